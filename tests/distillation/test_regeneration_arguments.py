"""Options of a run that can't work are refused before anything is loaded."""

import pytest

from hf_dspark.distillation.regeneration_arguments import RegenerationArguments

SERVER = {"server": "http://localhost:8000/v1", "dataset": "chats.jsonl"}


def arguments(**options) -> RegenerationArguments:
    return RegenerationArguments(**{"target": "t", "output_file": "o", **options})


def test_defaults_by_dataset():
    stdlib, chats = arguments(), arguments(dataset="chats.jsonl")
    assert (stdlib.num_rows, stdlib.prompt_tokens, stdlib.new_tokens, stdlib.greedy_share) == (4096, 32, 224, 0.5)
    assert (chats.num_rows, chats.prompt_tokens, chats.new_tokens, chats.greedy_share) == (None, None, 2048, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_rows": 0}, "num_rows must be at least 1, got 0"),
        ({"new_tokens": -1}, "new_tokens must be at least 1, got -1"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"request_timeout": 0.0}, "request_timeout must be at least 1"),
        ({"max_retries": -1}, "max_retries must not be negative, got -1"),
        ({"temperature": -0.5}, "temperature must not be negative, got -0.5"),
        ({"temperature": float("nan")}, "temperature must not be negative, got nan"),
        ({"top_k": -1}, "top_k must not be negative, got -1"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], got 1.5"),
        ({"degenerate_share": 0.0}, "degenerate_share must lie in"),
        ({"greedy_share": 1.5}, r"greedy_share must lie in \[0, 1\], got 1.5"),
        ({"answered_turns": "first"}, "answered_turns must be all or last, got 'first'"),
        ({"dtype": "fp16"}, "dtype must be auto, float32, bfloat16 or float16, got 'fp16'"),
        ({"server_model": "m"}, "server_model='m' is about a server; name its address with server"),
        ({"api_key_env": "KEY"}, "api_key_env='KEY' is about a server"),
        ({"server": SERVER["server"]}, "dataset='stdlib' is text to be continued"),
        ({**SERVER, "server": "localhost:8000"}, "server must be an address such as http://localhost:8000/v1, got 'localhost:8000'"),
        ({**SERVER, "apply_chat_template": False}, "apply_chat_template=False continues texts in process"),
        ({**SERVER, "draft": "d"}, "draft='d' works in process"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        arguments(**options)


def test_a_password_in_the_address_is_refused_without_repeating_it():
    for address in ("http://me:SECRET@host/v1", "https://host/v1?api-key=SECRET"):
        with pytest.raises(ValueError, match="server must hold no name, password or query") as error:
            arguments(**{**SERVER, "server": address})
        assert "SECRET" not in str(error.value)
