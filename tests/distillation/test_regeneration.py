"""Text by the target itself."""

import json
import threading
from functools import wraps

import pytest
import torch
from fake_chat_server import FakeChatServer
from oracle import tiny_target
from test_conversations import LLAMA3, QWEN3, tokenizer_with
from test_writers import THREE_TURNS, assert_written_by, digit_target
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkDraftModel, generate_many
from hf_dspark.cli import main
from hf_dspark.distillation import regeneration, server
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.corpus import held_out_split, train_tokenizer
from hf_dspark.distillation.distill import distill
from hf_dspark.distillation.features import weights_fingerprint
from hf_dspark.distillation.regeneration import RegenerationArguments, regenerate

TEXTS = {f"module_{i}.py": f"def function_{i}(x):\n    return x + {i}\n" * 120 for i in range(6)}


@pytest.fixture
def target_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(regeneration, "stdlib_modules", lambda: TEXTS)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "target")
    train_tokenizer(list(TEXTS.values()), 300).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def arguments(target_folder, **changes):
    values = dict(num_rows=6, prompt_tokens=5, new_tokens=20, greedy_share=0.5, batch_size=3, num_held_out=2, seed=1, dtype="float32", device="cpu")
    values |= dict(target=str(target_folder), output_file=str(target_folder.parent / "out" / "rows.jsonl"))
    return RegenerationArguments(**{**values, **changes})


def test_greedy_rows_continue_their_prompts_as_the_target_does(target_folder):
    path = regenerate(arguments(target_folder))
    rows = [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]
    assert len(rows) == 6
    target, tokenizer = Qwen3ForCausalLM.from_pretrained(target_folder), AutoTokenizer.from_pretrained(target_folder)
    for row in rows[:3]:
        alone = target.generate(torch.tensor([row[:5]]), attention_mask=torch.ones(1, 5), max_new_tokens=20, do_sample=False)
        assert row == alone[0].tolist()
    for row in rows:
        assert tokenizer.pad_token_id not in row[5:] or len(row) == 25
        assert tokenizer.eos_token_id not in row[5:-1]


def test_rows_are_repeatable_and_sampled_ones_depend_on_the_seed(target_folder):
    first, again, other = (
        regenerate(arguments(target_folder, output_file=str(target_folder.parent / name), seed=seed)).read_text()
        for name, seed in (("a.jsonl", 1), ("b.jsonl", 1), ("c.jsonl", 2))
    )
    assert first == again != other


def test_an_interrupted_run_leaves_no_file_and_goes_on_where_it_stopped(target_folder, monkeypatch):
    whole = regenerate(arguments(target_folder)).read_text()
    path = target_folder.parent / "out" / "rows.jsonl"
    path.unlink()
    calls = iter(range(100))
    forward = Qwen3ForCausalLM.forward

    @wraps(forward)  # generate() reads its signature
    def stopping(self, *args, **kwargs):
        if next(calls) == 30:  # the first rows are done after 20 steps
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="3 of 6 rows are kept"):
        patch.setattr(Qwen3ForCausalLM, "forward", stopping)
        regenerate(arguments(target_folder, batch_size=3))
    unfinished = path.with_name("rows.jsonl.unfinished")
    assert not path.exists() and len(unfinished.read_text().splitlines()) == 1 + 3  # the settings, the rows
    unfinished.write_text(unfinished.read_text() + '{"row": 3, "finger')  # a row that was being written
    assert regenerate(arguments(target_folder)).read_text() == whole and not unfinished.exists()


def test_rows_of_another_run_are_not_kept_nor_a_finished_file_written_over(target_folder):
    path = target_folder.parent / "out" / "rows.jsonl"
    path.parent.mkdir()
    unfinished = path.with_name("rows.jsonl.unfinished")
    unfinished.write_text('{"input_ids": [7, 7, 7, 7, 7, 7]}\n')
    with pytest.raises(ValueError, match="was not begun by this version of hf-dspark regenerate; delete it to begin anew"):
        regenerate(arguments(target_folder))
    unfinished.unlink()
    before = regenerate(arguments(target_folder)).read_text()
    with pytest.raises(ValueError, match=r"rows\.jsonl is there already, with all its rows; delete it to write it anew, or name another file"):
        regenerate(arguments(target_folder, seed=2))
    assert path.read_text() == before and not unfinished.exists()


def test_stdlib_rows_are_written_by_the_pinned_law(target_folder):
    """The rows of a seed do not change with the code: the prompts and the seed of each row are the ones of the published data."""
    path = regenerate(arguments(target_folder, greedy_share=0.0))
    target = Qwen3ForCausalLM.from_pretrained(target_folder)
    for number, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        assert set(row) == {"input_ids", "provenance"}
        request = {"input_ids": row["input_ids"][:5], "seed": 1 * 6 + number}
        [completion] = generate_many(target, None, [request], max_new_tokens=20, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        assert completion.output[0].tolist() == row["input_ids"]


def test_stdlib_prompts_are_pieces_of_all_modules_one_behind_the_other(target_folder, monkeypatch):
    """However many are read at a time: bos and module, bos and module, ..., cut at the seed's places."""
    modules = {f"m{i:02d}.py": f"value_{i} = {i}\n" * 180 for i in range(80)}
    monkeypatch.setattr(regeneration, "stdlib_modules", lambda: modules)
    tokenizer, args = AutoTokenizer.from_pretrained(target_folder), arguments(target_folder, num_rows=40, prompt_tokens=9)
    train = held_out_split(modules, 2)[0].values()
    stream = [token for text in train for token in [1, *tokenizer(text, add_special_tokens=False)["input_ids"]]]
    places = torch.randint(len(stream) - 9, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    assert regeneration._stdlib_prompts(tokenizer, args) == [stream[place : place + 9] for place in places]


# Conversations and prompts


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """A folder with a target and its tokenizer, and files of conversations and prompts."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(server, "_FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    tokenizer = tokenizer_with(QWEN3)
    tokenizer.save_pretrained(tmp_path / "target")
    target = digit_target(tokenizer)
    target.generation_config.update(do_sample=True, temperature=0.8, top_k=7)
    target.save_pretrained(tmp_path / "target")
    write(
        tmp_path / "chats.jsonl",
        [{"messages": THREE_TURNS}, {"messages": THREE_TURNS[:1]}, {"messages": THREE_TURNS[1:2]}, {"messages": THREE_TURNS[:2]}],
    )
    write(tmp_path / "prompts.jsonl", [{"prompt": f"Is it {i}?"} for i in range(20)])
    return tmp_path


def write(path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat_arguments(folder, data="prompts.jsonl", **options) -> RegenerationArguments:
    values = dict(target=str(folder / "target"), output_file=str(folder / "rows.jsonl"), dataset=str(folder / data), new_tokens=8, concurrency=3)
    values |= {"server_model": "target"} if "server" in options else {}
    return RegenerationArguments(**{**values, "max_retries": 1, "device": "cpu", "dtype": "float32", **options})


def answer_by_number(body, number):
    """The answer is a function of the question, whichever thread asks it."""
    return body["messages"][-1]["content"].replace("Is it", "It is").replace("?", ".")


def test_conversations_in_process(chats, capsys):
    path = regenerate(chat_arguments(chats, "chats.jsonl", temperature=0.0))
    rows, target = read(path), Qwen3ForCausalLM.from_pretrained(chats / "target")
    assert [row["row"] for row in rows] == [0, 1, 3] and all(set(row) == {"row", "input_ids", "loss_mask", "provenance"} for row in rows)
    for row in rows:
        assert_written_by(target, row, 8)
    out = capsys.readouterr().out
    assert "answers: greedy, up to 8 new tokens" in out
    assert f"wrote 3 rows to {path}: 5 answers" in out and "1 rows without a user turn" in out
    [provenance] = {row["provenance"] for row in rows}
    facts = json.loads(provenance)
    assert facts["target"] == "./target" and facts["dataset"] == "./chats.jsonl" and facts["mode"] == "in process" and str(chats) not in provenance
    assert facts["counts"]["rows"] == 3 and facts["counts"]["answers"] == 5 and facts["counts"]["failed"] == 0


def test_greedy_rows_beside_sampled_ones_are_no_misuse_of_options(chats, monkeypatch):
    """transformers warns of options of sampling that stand beside do_sample=False."""
    warned = []
    monkeypatch.setattr("transformers.generation.configuration_utils.logger.warning_once", lambda message, *args: warned.append(message))
    for number, options in enumerate(({"greedy_share": 0.5}, {"greedy_share": 0.5, "top_k": 0}, {"temperature": 0.0})):
        regenerate(chat_arguments(chats, num_rows=4, output_file=str(chats / f"rows{number}.jsonl"), **options))
    assert [message for message in warned if "flags are not valid" in message] == []


def test_rows_say_the_weights_of_the_target_that_wrote_them(chats):
    """The same in whatever type the target is loaded; distill compares them with its own target's."""
    found = []
    for number, dtype in enumerate(("float32", "bfloat16", "auto", "float16")):
        path = regenerate(chat_arguments(chats, num_rows=1, dtype=dtype, output_file=str(chats / f"rows{number}.jsonl")))
        found.append(json.loads(read(path)[0]["provenance"]).get("target_weights"))
    target = Qwen3ForCausalLM.from_pretrained(chats / "target")
    assert found == [weights_fingerprint(target, rounded=True)] * 3 + [None]  # which rounds in a way of its own


def test_answers_that_are_all_left_out_are_told_with_what_to_do(chats):
    cut = dict(temperature=0.0, new_tokens=1, num_rows=3, drop_degenerate=True)
    with pytest.raises(ValueError, match=r"0 loop, 3 are cut at new_tokens=1; .*drop_degenerate=True .*: raise new_tokens, .* delete .*unfinished"):
        regenerate(chat_arguments(chats, **cut))
    with FakeChatServer(lambda body, number: "a b c " * 40) as fake:
        loops = dict(num_rows=3, drop_degenerate=True, server=fake.url, output_file=str(chats / "loops.jsonl"))
        with pytest.raises(ValueError, match=r"3 loop, 0 are cut .*leaves out what loops or is cut: set it to False to keep them"):
            regenerate(chat_arguments(chats, **loops))


@pytest.mark.parametrize("device", ["cuda:99", "foo"])
def test_a_device_that_is_not_there_is_named_before_anything_is_read(chats, device):
    with pytest.raises(ValueError, match=f"the device '{device}' can't be used here"):
        regenerate(chat_arguments(chats, device=device))
    assert list(chats.glob("rows.jsonl*")) == []


@pytest.mark.parametrize("option", ["target", "draft"])
def test_a_model_that_is_not_there_is_named(chats, option, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=f"^{option}: 'out/nowhere' is no folder here, and the Hub does not give it"):
        regenerate(chat_arguments(chats, **{option: "out/nowhere"}))


def test_the_targets_own_sampling_is_the_default(chats, capsys):
    regenerate(chat_arguments(chats, num_rows=3))
    assert "answers: temperature 0.8, top-k 7, up to 8 new tokens" in capsys.readouterr().out
    [row, *_] = rows = read(chats / "rows.jsonl")
    assert len(rows) == 3 and json.loads(row["provenance"])["sampling"] == {"do_sample": True, "temperature": 0.8, "top_k": 7, "top_p": 1.0}


def test_a_draft_makes_no_difference_to_greedy_rows(chats):
    plain = read(regenerate(chat_arguments(chats, temperature=0.0, num_rows=3)))
    (chats / "rows.jsonl").unlink()
    target = Qwen3ForCausalLM.from_pretrained(chats / "target")
    config = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_hidden_layers=1, block_size=4)
    config |= dict(vocab_size=target.config.vocab_size, num_target_layers=2, target_layer_ids=[0], markov_rank=2, mask_token_id=3, eos_token_id=None)
    DSparkDraftModel(DSparkDraftModel.config_class(**config)).save_pretrained(chats / "draft")
    assert read(regenerate(chat_arguments(chats, temperature=0.0, num_rows=3, draft=str(chats / "draft")))) == plain


def test_rows_keep_their_place_however_the_server_answers(chats, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-SECRET")
    late = threading.Event()

    def respond(body, number):
        if "Is it 0?" in body["messages"][-1]["content"]:
            late.wait(10)
        if len(fake.requests) == 20:
            late.set()
        return answer_by_number(body, number)

    with FakeChatServer(respond, models=["served"]) as fake:
        path = regenerate(chat_arguments(chats, server=fake.url, server_model="served", api_key_env="MY_KEY"))
    rows = read(path)
    assert [row["row"] for row in rows] == list(range(20))
    assert [[m["content"] for m in row["messages"]] for row in rows] == [[f"Is it {i}?", f"It is {i}."] for i in range(20)]
    assert {headers["Authorization"] for _, headers, _ in fake.requests} == {"Bearer sk-SECRET"}
    body = fake.requests[0][2]
    assert (body["model"], body["temperature"], body["top_k"], body["top_p"], body["max_tokens"]) == ("served", 0.8, 7, 1.0, 8)
    facts = json.loads(rows[0]["provenance"])
    assert facts["mode"] == "server" and "SECRET" not in path.read_text() and "127.0.0.1" not in path.read_text()


def test_a_killed_run_goes_on_without_asking_twice(chats, monkeypatch):
    asked_before = []

    def interrupting(self, dialogue, error, keep=regeneration._Run.keep):
        keep(self, dialogue, error)
        asked_before.append(f"Is it {dialogue.row}?")
        if len(asked_before) == 7:
            raise KeyboardInterrupt

    with FakeChatServer(answer_by_number) as fake:
        args = chat_arguments(chats, server=fake.url, concurrency=1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(regeneration._Run, "keep", interrupting)
            regenerate(args)
        assert not (chats / "rows.jsonl").exists()
        first = len(fake.requests)
        with (chats / "rows.jsonl.unfinished").open("a") as file:
            file.write('{"row": 19, "fing')
        regenerate(args)
        assert not set(fake.questions()[first:]) & set(asked_before) and len(fake.requests) <= 20 + 1
    assert [row["messages"][0]["content"] for row in read(chats / "rows.jsonl")] == [f"Is it {i}?" for i in range(20)]


def test_an_interrupted_run_in_process_goes_on_with_the_same_rows(chats, monkeypatch):
    whole = read(regenerate(chat_arguments(chats, batch_size=4)))
    (chats / "rows.jsonl").unlink()
    calls, forward = iter(range(1000)), Qwen3ForCausalLM.forward

    @wraps(forward)  # generate() reads its signature
    def stopping(self, *args, **kwargs):
        if next(calls) == 12:
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    with (
        monkeypatch.context() as patch,
        pytest.raises(KeyboardInterrupt, match=r"\d+ of 20 rows are kept in .*rows.jsonl.unfinished; the same command"),
    ):
        patch.setattr(Qwen3ForCausalLM, "forward", stopping)
        regenerate(chat_arguments(chats, batch_size=4))
    assert read(regenerate(chat_arguments(chats, batch_size=4))) == whole


def test_failures_are_written_aside_and_asked_again(chats, capsys):
    def failing(body, number):
        question = body["messages"][-1]["content"]
        if question == "Is it 3?":
            return 400, {"error": "no"}
        return (500, {"error": "busy"}) if question == "Is it 11?" else answer_by_number(body, number)

    with FakeChatServer(failing) as fake:
        args = chat_arguments(chats, server=fake.url)
        regenerate(args)
        assert fake.questions().count("Is it 3?") == 1 and fake.questions().count("Is it 11?") == 2
    failures = {failure["row"]: failure["error"] for failure in read(chats / "rows.jsonl.failures.jsonl")}
    assert (
        failures.keys() == {3, 11} and failures[3] == 'HTTP 400: {"error": "no"}' and "HTTP 500" in failures[11] and "tried 2 times" in failures[11]
    )
    assert [row["row"] for row in read(chats / "rows.jsonl")] == [i for i in range(20) if i not in (3, 11)]
    assert "2 rows failed, see" in (out := capsys.readouterr().out) and "the same command asks for these again" in out
    assert json.loads(read(chats / "rows.jsonl")[0]["provenance"])["counts"]["failed"] == 2
    with FakeChatServer(answer_by_number) as fake:
        regenerate(chat_arguments(chats, server=fake.url))
        assert sorted(fake.questions()) == ["Is it 11?", "Is it 3?"]
    assert [row["row"] for row in read(chats / "rows.jsonl")] == list(range(20))
    assert {path.name for path in chats.glob("rows.jsonl*")} == {"rows.jsonl"}


def test_a_server_that_dies_leaves_what_it_answered(chats, capsys):
    fake = FakeChatServer(lambda body, number: answer_by_number(body, number) if number < 8 else (404, {"error": "gone"}))
    with fake, pytest.raises(OSError, match="HTTP 404"):
        regenerate(chat_arguments(chats, server=fake.url))
    kept = len((chats / "rows.jsonl.unfinished").read_text().splitlines()) - 1
    assert 5 <= kept <= 8 and not (chats / "rows.jsonl").exists()
    assert f"{kept} of 20 rows are kept in {chats / 'rows.jsonl.unfinished'}; the same command goes on" in capsys.readouterr().out


def test_a_run_without_hope_is_stopped(chats, monkeypatch):
    monkeypatch.setattr(regeneration, "_HOPELESS_FAILURES", 5)
    servers, chat_server = [], regeneration.ChatServer
    monkeypatch.setattr(regeneration, "ChatServer", lambda *args, **options: servers.append(chat_server(*args, **options)) or servers[-1])
    with FakeChatServer(lambda body, number: (400, {"error": "unknown field top_k"})) as fake:
        with pytest.raises(ValueError, match=r"none of the first 5 rows could be answered; the first failed with HTTP 400.*top_k") as caught:
            regenerate(chat_arguments(chats, server=fake.url))
        assert len(fake.requests) < 20
        # Although the error, whose traceback holds the run, is still at hand.
        assert caught.value is not None and servers[0].stop.is_set()
        with pytest.raises(ValueError, match=r"no row of .* was answered: .* 2 rows failed, first with HTTP 400"):
            regenerate(chat_arguments(chats, server=fake.url, num_rows=2))


def test_rows_that_fail_again_do_not_keep_an_interrupted_run_from_going_on(chats, monkeypatch):
    """They are asked first when it goes on, before any that can be answered."""
    monkeypatch.setattr(regeneration, "_HOPELESS_FAILURES", 5)
    hopeless = [f"Is it {i}?" for i in range(1, 8)]

    def respond(body, number):
        question = body["messages"][-1]["content"]
        if question == "Is it 12?" and fake.questions().count(question) == 1:
            return 404, {"error": "gone for a while"}
        return (400, {"error": "too long"}) if question in hopeless else answer_by_number(body, number)

    with FakeChatServer(respond) as fake:
        args = chat_arguments(chats, server=fake.url, concurrency=1)
        with pytest.raises(OSError, match="gone for a while"):
            regenerate(args)
        rows = read(regenerate(args))
    assert [row["row"] for row in rows] == [0, *range(8, 20)] and len(read(chats / "rows.jsonl.failures.jsonl")) == 7


def test_an_unreachable_server_is_one_clear_error_before_anything_is_written(chats, tmp_path, capsys):
    with FakeChatServer() as fake:
        url = fake.url
    recipe = tmp_path / "recipe.yaml"
    lines = {"target": chats / "target", "output_file": chats / "rows.jsonl", "dataset": chats / "prompts.jsonl", "server": url, "max_retries": 1}
    recipe.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    assert main(["regenerate", str(recipe)]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-dspark:")]
    assert f"the server {url} can't be reached" in line and "tried 2 times" in line
    assert list(chats.glob("rows.jsonl*")) == []


def test_settings_of_an_unfinished_run_are_named_when_they_differ(chats):
    with FakeChatServer(lambda body, number: (400, {}) if number == 2 else "Yes.") as fake:
        regenerate(chat_arguments(chats, server=fake.url))
        with pytest.raises(ValueError, match=r"begun with seed 0 \(now 1\); take these back"):
            regenerate(chat_arguments(chats, server=fake.url, seed=1))
        (chats / "target").rename(chats / "other")
        with pytest.raises(ValueError, match=r"begun with target '.*/target' \(now '.*/other'\); take these back"):
            regenerate(chat_arguments(chats, server=fake.url, target=str(chats / "other")))


def test_rows_of_changed_prompts_are_asked_again(chats):
    with FakeChatServer(lambda body, number: (400, {}) if "19" in body["messages"][-1]["content"] else answer_by_number(body, number)) as fake:
        regenerate(chat_arguments(chats, server=fake.url))
        write(chats / "prompts.jsonl", [{"prompt": " " if i == 9 else f"Is it {({4: 5, 7: 19}).get(i, i)}?"} for i in range(19)])
        first = len(fake.requests)
        regenerate(chat_arguments(chats, server=fake.url))
        assert sorted(fake.questions()[first:]) == ["Is it 19?", "Is it 5?"]
    answers = {row["row"]: row["messages"][1]["content"] for row in read(chats / "rows.jsonl")}
    assert answers == {i: f"It is {i + (i == 4)}." for i in range(19) if i not in (7, 9)}  # what these were, they are not any more


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"question": "x"}], {}, "needs a column 'messages', 'conversations', 'turns', 'prompt' or 'text', it has"),
        ([{"prompt": "x"}], {"dataset_column": "q"}, "needs the column 'q'"),
        ([{"messages": THREE_TURNS[1:2]}], {}, "was answered: 1 of 1 rows have no user turn, or no text"),
        ([{"prompt": "x"}], {"temperature": 0.0, "top_p": 0.5}, "top_p=0.5 has no effect on greedy decoding"),
        ([{"messages": THREE_TURNS}], {"apply_chat_template": False}, "holds messages, which need a chat template"),
        ([], {}, "is empty|cannot be read"),
    ],
    ids=["column", "named column", "no user", "greedy", "raw messages", "empty"],
)
def test_bad_data_is_named(chats, rows, options, message):
    write(chats / "bad.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        regenerate(chat_arguments(chats, "bad.jsonl", **options))


def test_a_target_without_a_chat_template(chats):
    tokenizer_with(None).save_pretrained(chats / "target")
    (chats / "target" / "chat_template.jinja").unlink(missing_ok=True)
    for turns in (THREE_TURNS, ["Is it?", "Why?"]):
        write(chats / "turns.jsonl", [{"turns": turns, "text": "Is it?"}])
        for options in ({}, {"apply_chat_template": False}, {"apply_chat_template": True}):
            match = "has no chat template to render conversations with, .*'turns'.*; name a column of texts to continue with dataset_column"
            with pytest.raises(ValueError, match=match):
                regenerate(chat_arguments(chats, "turns.jsonl", **options))
    assert read(regenerate(chat_arguments(chats, "turns.jsonl", dataset_column="text", output_file=str(chats / "continued.jsonl"))))
    for options in ({"apply_chat_template": True}, {"server": "http://localhost:1/v1"}):
        with pytest.raises(ValueError, match=r"has no chat template .* holds texts; leave apply_chat_template and server out to continue them"):
            regenerate(chat_arguments(chats, **options))
    write(chats / "prompts.jsonl", [{"prompt": None}, *({"prompt": f"Is it {i}?"} for i in range(4))])
    rows = read(regenerate(chat_arguments(chats, prompt_tokens=2)))
    assert rows and 0 not in [row["row"] for row in rows]
    assert all(row["loss_mask"][:2] == [0, 0] for row in rows) and len({tuple(row["input_ids"][:2]) for row in rows}) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_two_kinds_are_named_before_anything_is_written(chats, monkeypatch, streaming):
    write(chats / "mixed.jsonl", [*({"turns": ["Is it?"]} for _ in range(5)), {"prompt": "Is it?"}])
    message = r"mixed\.jsonl', row 5: expected the column 'turns', as other rows have it, got 'prompt' alone"
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
        if not streaming:  # of a stream the rows before it have been asked for
            patch.setattr(regeneration, "TargetWriter", None)
        regenerate(chat_arguments(chats, "mixed.jsonl", streaming=streaming))
    assert not (chats / "rows.jsonl").exists()
    rows = read(regenerate(chat_arguments(chats, "mixed.jsonl", streaming=streaming, num_rows=5, output_file=str(chats / "five.jsonl"))))
    assert [row["row"] for row in rows] == [0, 1, 2, 3, 4]
    named = dict(dataset_column="prompt", output_file=str(chats / "named.jsonl"))
    assert [row["row"] for row in read(regenerate(chat_arguments(chats, "mixed.jsonl", streaming=streaming, **named)))] == [5]


def test_more_tokens_than_the_target_has_positions_for(chats, monkeypatch):
    """chats: 256 positions; the server's are its own matter."""
    answered = chat_arguments(chats, new_tokens=256)
    with FakeChatServer(answer_by_number) as fake:
        assert len(read(regenerate(chat_arguments(chats, new_tokens=256, server=fake.url, output_file=str(chats / "served.jsonl"))))) == 20
    monkeypatch.setattr(regeneration, "TargetWriter", None)
    message = r"a prompt of 1 tokens and new_tokens=256 do not fit into the context of '.*target', 256 tokens .*; lower new_tokens"
    with pytest.raises(ValueError, match=message):
        regenerate(answered)
    texts = dict(apply_chat_template=False, prompt_tokens=200, new_tokens=57)
    with pytest.raises(ValueError, match=r"a prompt of 200 tokens and new_tokens=57 .*; lower new_tokens or prompt_tokens"):
        regenerate(chat_arguments(chats, **texts))
    with pytest.raises(TypeError, match="NoneType"):  # 256 of 256: the writer is asked
        regenerate(chat_arguments(chats, **{**texts, "new_tokens": 56}))


def test_pieces_of_modules_that_do_not_fit_the_target(target_folder):
    with pytest.raises(ValueError, match=r"a prompt of 32760 tokens and new_tokens=20 do not fit into the context of '.*target', 32768 tokens"):
        regenerate(arguments(target_folder, prompt_tokens=32760))


def test_a_stream_of_prompts(chats):
    with FakeChatServer(answer_by_number) as fake:
        rows = read(regenerate(chat_arguments(chats, server=fake.url, streaming=True, num_rows=4)))
    assert [row["messages"][1]["content"] for row in rows] == [f"It is {i}." for i in range(4)]


# To the draft


@pytest.mark.parametrize("how", ["in process", "server"])
def test_provenance_reaches_the_drafts_config_report_and_card(chats, how):
    tokenizer = tokenizer_with(LLAMA3)
    tokenizer.save_pretrained(chats / "target")
    shape = dict(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=tokenizer.convert_tokens_to_ids("<|eot_id|>"), pad_token_id=None)
    tiny_target(**shape).save_pretrained(chats / "target")
    with FakeChatServer(lambda body, number: f"It is so, {number}.") as fake:
        regenerate(chat_arguments(chats, temperature=0.9, new_tokens=16, **({"server": fake.url} if how == "server" else {})))
    write(chats / "plain.jsonl", [{"input_ids": list(range(20))}] * 20)
    small = dict(block_size=4, num_draft_layers=1, markov_rank=4, num_anchors=4, max_steps=1, num_key_value_heads=1, max_length=64, mask_token_id=9)
    options = dict(target=str(chats / "target"), dataset=str(chats / "plain.jsonl"), extra_rows=[str(chats / "rows.jsonl")], num_held_out=0)
    output = distill(DistillationArguments(output_dir=str(chats / "draft"), use_cpu=True, disable_tqdm=True, save_strategy="no", **options, **small))
    data, report = DSparkDraftModel.from_pretrained(output).config.training_data, json.loads((output / "distillation.json").read_text())
    share = data["regenerated_share"]
    assert 0.2 < share <= 0.5 and 0 < data["regenerated_token_share"] < 1 and report["regenerated_share"] == share
    [source] = data["sources"]
    assert (source["target"], source["mode"], source["sampling"]["temperature"]) == ("./target", how, 0.9)
    card = (output / "README.md").read_text()
    for line in (f"{100 * share:.3g} % of the rows", "| how it wrote | temperature 0.9 |", f"`{source['chat_template_sha256']}`"):
        assert line in card, line
    assert str(chats) not in card and str(chats) not in json.dumps(data)


def test_distill_knows_the_rows_of_another_target_in_a_folder_of_the_same_name(chats, caplog):
    tokenizer = AutoTokenizer.from_pretrained(chats / "target")
    regenerate(chat_arguments(chats, temperature=0.9, new_tokens=16))
    tiny_target(vocab_size=len(tokenizer), pad_token_id=None).save_pretrained(chats / "target")
    small = dict(block_size=4, num_draft_layers=1, markov_rank=4, num_anchors=4, max_steps=1, num_key_value_heads=1, max_length=64, mask_token_id=9)
    options = dict(target=str(chats / "target"), dataset=str(chats / "rows.jsonl"), num_held_out=0, save_strategy="no", disable_tqdm=True)
    with caplog.at_level("WARNING", logger="hf_dspark"):
        output = distill(DistillationArguments(output_dir=str(chats / "draft"), use_cpu=True, **options, **small))
    assert [message for message in caplog.messages if "another ./target wrote them, whose weights are not" in message]
    assert "regenerated_share" not in DSparkDraftModel.from_pretrained(output).config.training_data


def test_distill_names_what_its_target_does_not_know(chats, monkeypatch):
    """Token ids of another tokenizer; a target that is not there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write(chats / "plain.jsonl", [{"input_ids": list(range(20))}, {"input_ids": [5, 6, 7, 999_999] * 5}])
    options = dict(output_dir=str(chats / "draft"), use_cpu=True, block_size=4, max_length=64, mask_token_id=9, num_held_out=0)
    with pytest.raises(ValueError, match=r"plain\.jsonl': row 1 holds the token id 999999, but the target's vocabulary has \d+ tokens"):
        distill(DistillationArguments(target=str(chats / "target"), dataset=str(chats / "plain.jsonl"), num_draft_layers=1, **options))
    with pytest.raises(FileNotFoundError, match=r"^target: 'out/nowhere' is no folder here"):
        distill(DistillationArguments(target="out/nowhere", dataset=str(chats / "plain.jsonl"), **options))
