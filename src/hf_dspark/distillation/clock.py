"""Time spent training, over all runs that one training was interrupted into."""

import time
from contextlib import contextmanager

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

__all__ = ["TrainingClock"]


class TrainingClock(TrainerCallback, ExportableState):
    """Counts the seconds of training, evaluations left out; checkpoints carry them, and a resumed run goes on counting from there."""

    def __init__(self):
        self._counted, self._started = 0.0, None

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._counted + (0.0 if self._started is None else time.monotonic() - self._started)

    @contextmanager
    def paused(self):
        """Stands still inside."""
        running = self._started is not None
        self._counted, self._started = self.seconds, None
        try:
            yield
        finally:
            self._started = time.monotonic() if running else None

    def on_train_begin(self, args, state, control, **kwargs):
        saved = state.stateful_callbacks.get(type(self).__name__) or {} if state.global_step else {}
        self._counted, self._started = saved.get("attributes", {}).get("seconds", 0.0), time.monotonic()

    def on_train_end(self, args, state, control, **kwargs):
        self._counted, self._started = self.seconds, None

    def state(self) -> dict:
        """What a checkpoint keeps, in transformers' form."""
        return {"args": {}, "attributes": {"seconds": self.seconds}}
