"""Options of `hf-dspark regenerate`."""

from dataclasses import dataclass, field

from hf_dspark.distillation.server import check_server_url
from hf_dspark.evaluation.acceptance import LOOPING_SHARE

__all__ = ["RegenerationArguments"]


@dataclass
class RegenerationArguments:
    """Options of `hf-dspark regenerate`.

    Raises:
        ValueError: an option that can't work; the message has its name and value.
    """

    target: str = field(metadata={"help": "Folder or hub id of the target model."})
    output_file: str = field(metadata={"help": "JSONL file to write; must not be there yet."})
    dataset: str = field(
        default="stdlib",
        metadata={
            "help": "'stdlib' (pieces of Python's standard library to be continued), or a file, folder or Hub id as in `hf-dspark distill`: of "
            "conversations (column `messages`), whose answers are written anew, or of prompts (`turns`, `prompt`, `text`)."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "The dataset's configuration, where the Hub's has several."})
    dataset_split: str = field(default="train", metadata={"help": "Split to read, of a folder or of a dataset on the Hub."})
    dataset_column: str | None = field(
        default=None, metadata={"help": "Column to read. None: `messages`, `conversations`, `turns`, `prompt` or `text`, the first there."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read the dataset as it is needed, instead of downloading it before."})
    num_rows: int | None = field(default=None, metadata={"help": "Rows to answer, the first of the dataset. None: all; 4096 of 'stdlib'."})
    answered_turns: str = field(
        default="all",
        metadata={"help": "Of a conversation: 'all' answers, each after the new ones before it; or the 'last', after the conversation as it is."},
    )
    apply_chat_template: bool | None = field(
        default=None, metadata={"help": "Prompts are what a user says; False: texts to be continued. None: whether the target has a chat template."}
    )
    enable_thinking: bool | None = field(default=None, metadata={"help": "Passed to the chat template. None: the template's own default."})
    prompt_tokens: int | None = field(
        default=None, metadata={"help": "First tokens of a text to be continued, at most; None: all. Of 'stdlib': cut at random places; None: 32."}
    )
    new_tokens: int | None = field(default=None, metadata={"help": "Tokens of an answer, at most. None: 2048; 224 of 'stdlib'."})
    temperature: float | None = field(
        default=None, metadata={"help": "0: greedy. None: as the target's generation config says, in chats and prompts; 1 of 'stdlib'."}
    )
    top_k: int | None = field(default=None, metadata={"help": "0: off. None: as the target's generation config says; off of 'stdlib'."})
    top_p: float | None = field(default=None, metadata={"help": "1: off. None: as the target's generation config says; off of 'stdlib'."})
    greedy_share: float | None = field(default=None, metadata={"help": "Share of the rows written greedily. None: none; half of 'stdlib'."})
    drop_degenerate: bool = field(
        default=False, metadata={"help": "Leave out answers that loop, and in chats those cut at the length limit; their conversation ends before."}
    )
    degenerate_share: float = field(
        default=LOOPING_SHARE, metadata={"help": "An answer loops if at least this share of its 8-grams had occurred in it before."}
    )
    batch_size: int = field(default=128, metadata={"help": "Rows written at a time, in process."})
    dtype: str = field(default="auto", metadata={"help": "The target's type, in process: auto (as stored), float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, cuda:1, ... None: the first GPU, else the CPU."})
    draft: str | None = field(
        default=None, metadata={"help": "A draft at hand that makes it faster, in process; the law of the text stays the target's."}
    )
    server: str | None = field(
        default=None, metadata={"help": "Let a server answer that has the target, such as http://localhost:8000/v1 (vLLM, SGLang). None: in process."}
    )
    server_model: str | None = field(default=None, metadata={"help": "The target's name at the server. None: as `target`."})
    api_key_env: str | None = field(default=None, metadata={"help": "Environment variable that holds the server's API key. None: no key is sent."})
    concurrency: int = field(default=32, metadata={"help": "Requests that the server gets at a time."})
    request_timeout: float = field(default=600.0, metadata={"help": "Seconds that the server may take for an answer."})
    max_retries: int = field(default=5, metadata={"help": "How often a request is repeated, after 1, 2, 4, ... seconds."})
    num_held_out: int = field(default=96, metadata={"help": "Modules of 'stdlib' that are left alone (as in the target's recipe)."})
    seed: int = field(default=0, metadata={"help": "Seed of prompts and sampling."})

    def __post_init__(self):
        is_stdlib = self.dataset == "stdlib"
        of_stdlib = {"num_rows": 4096, "prompt_tokens": 32, "new_tokens": 224, "greedy_share": 0.5}
        defaults = of_stdlib if is_stdlib else {"new_tokens": 2048, "greedy_share": 0.0}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name in ("num_rows", "prompt_tokens", "new_tokens", "batch_size", "concurrency", "request_timeout"):
            if getattr(self, name) is not None and not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("temperature", "top_k", "max_retries"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0.0 <= self.greedy_share <= 1.0:
            raise ValueError(f"greedy_share must lie in [0, 1], got {self.greedy_share}")
        for name in ("top_p", "degenerate_share"):
            if getattr(self, name) is not None and not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}")
        for name, choices in (("answered_turns", ("all", "last")), ("dtype", ("auto", "float32", "bfloat16", "float16"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {getattr(self, name)!r}")
        self._check_server()

    def _check_server(self) -> None:
        if self.server is None:
            for name in ("server_model", "api_key_env"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)!r} is about a server; name its address with server")
            return
        check_server_url(self.server)
        if self.dataset == "stdlib":
            raise ValueError(f"server={self.server!r} answers chats, and dataset='stdlib' is text to be continued; leave one of them out")
        if self.apply_chat_template is False:
            raise ValueError("apply_chat_template=False continues texts in process; a server answers chats: leave one of them out")
        if self.draft is not None:
            raise ValueError(f"draft={self.draft!r} works in process; start the server with its own draft, or leave server out")
