"""How a target writes the rows of a run: its sampling options, which rows are greedy, each row's own seed."""

import hashlib
from dataclasses import dataclass

from transformers import GenerationConfig

from hf_dspark.distillation.regeneration_arguments import RegenerationArguments

__all__ = ["Sampling"]

# Of generation configs, beside do_sample; the value that changes nothing.
_LAW = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
_FURTHER = {"min_p": None, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class Sampling:
    """options: generate()'s, do_sample among them. greedy_share: of the rows that are written greedily all the same.

    num_rows: where rows are a corpus's pieces, of which the first ones are greedy; None: the greedy ones are spread evenly.
    """

    options: dict
    greedy_share: float
    seed: int
    num_rows: int | None = None

    @classmethod
    def of_run(cls, generation_config: GenerationConfig, args: RegenerationArguments) -> "Sampling":
        """As the target's `generation_config` says, where `args` doesn't say otherwise; what neither states is off, and without
        do_sample in the config the target is greedy. Text of 'stdlib' is sampled from the whole law by default.

        Raises:
            ValueError: top_k, top_p or a greedy_share is set, but the target writes greedily.
        """
        if args.dataset == "stdlib":
            options = {"do_sample": True, **_LAW}
        else:
            stated = {name: getattr(generation_config, name, None) for name in (*_LAW, *_FURTHER)}
            options = {"do_sample": bool(generation_config.do_sample), **{name: stated[name] or off for name, off in _LAW.items()}}
            options |= {name: stated[name] for name, off in _FURTHER.items() if stated[name] not in (None, off)}
        given = {name: getattr(args, name) for name in _LAW if getattr(args, name) is not None}
        if "temperature" in given:
            options["do_sample"] = given["temperature"] > 0
        if not options["do_sample"]:
            for name in ("top_k", "top_p"):
                if name in given:
                    raise ValueError(f"{name}={given[name]} has no effect on greedy decoding; set a temperature above 0")
            if 0 < args.greedy_share < 1 and args.dataset != "stdlib":
                raise ValueError(f"greedy_share={args.greedy_share}: this target writes all rows greedily; set a temperature above 0 for the others")
            options = {name: value for name, value in options.items() if name not in (*_LAW, "min_p")}
        else:
            options |= given
        return cls(options, args.greedy_share, args.seed, args.num_rows if args.dataset == "stdlib" else None)

    def is_greedy(self, row: int) -> bool:
        """Whether row `row` is written greedily."""
        if not self.options["do_sample"]:
            return True
        if self.num_rows is not None:
            return row < int(self.greedy_share * self.num_rows)
        return int((row + 1) * self.greedy_share) > int(row * self.greedy_share)

    def row_options(self, row: int, turn: int) -> dict:
        """generate()'s options for the answer `turn` in row `row`, with its `seed`; greedy decoding gets none of sampling's."""
        if not self.is_greedy(row):
            return {**self.options, "seed": self.row_seed(row, turn)}
        return {**{name: value for name, value in self.options.items() if name not in (*_LAW, "min_p")}, "do_sample": False}

    def row_seed(self, row: int, turn: int) -> int:
        """Below 2**63, of the answer `turn` in row `row`."""
        if self.num_rows is not None:
            return self.seed * self.num_rows + row
        return int.from_bytes(hashlib.sha256(f"{self.seed} {row} {turn}".encode()).digest()[:8], "little") % 2**63

    def server_options(self, row: int, turn: int) -> dict:
        """The fields of a request to a server."""
        further = {name: self.options[name] for name in _FURTHER if name in self.options}
        if self.is_greedy(row):
            return {"temperature": 0.0, **{name: value for name, value in further.items() if name != "min_p"}}
        # Servers may know the generation config too: what is off must be said. top_k is no field of OpenAI's own, vLLM and SGLang call -1 off.
        top_k = {"top_k": self.options["top_k"] or -1}
        law = {name: self.options[name] for name in ("temperature", "top_p")}
        return {**law, **top_k, **further, "seed": self.row_seed(row, turn) % 2**31}
