"""The client of a chat server, against one in this process."""

import socket
import threading

import pytest
from fake_chat_server import FakeChatServer

from hf_dspark.distillation import server as module
from hf_dspark.distillation.dialogues import Dialogue
from hf_dspark.distillation.server import ChatServer, RequestFailed, RequestRefused, ServerAnswer, ServerUnreachable, ask_all, read_api_key

QUESTION = [{"role": "user", "content": "Is it?"}]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_DELAY_SECONDS", 0.001)


def ask(fake, options=None, **settings) -> ServerAnswer:
    return ChatServer(fake.url, "target", **{"max_retries": 2, "timeout": 10, **settings}).answer(QUESTION, options or {})


def test_a_request_and_its_answer():
    with FakeChatServer(lambda body, number: "Yes.") as fake:
        assert ask(fake, {"temperature": 0.5}, api_key="sk-1") == ServerAnswer("Yes.", None, True)
    [(path, headers, body)] = fake.requests
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer sk-1"
    assert body == {"model": "target", "messages": QUESTION, "temperature": 0.5}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (("Ye", "length"), ServerAnswer("Ye", None, False)),
        ({"content": "Yes.", "reasoning_content": "Hm."}, ServerAnswer("Yes.", "Hm.", True)),
        ({"content": None, "reasoning": "Hm."}, ServerAnswer("", "Hm.", True)),
    ],
    ids=["cut", "reasoning", "reasoning alone"],
)
def test_other_answers(answer, expected):
    with FakeChatServer(lambda body, number: answer) as fake:
        assert ask(fake) == expected
    assert "Authorization" not in fake.requests[0][1]


TROUBLES = {
    "500": (500, {"error": "out of order"}),
    "429": (429, {}, {"Retry-After": "0"}),
    "503 in words": (503, b"<html>busy</html>"),
    "no JSON": b"<html>welcome</html>",
    "other JSON": b"[1]",
    "no choices": b'{"choices": []}',
    "content of parts": {"content": [{"type": "text"}]},
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_trouble_that_passes_is_waited_for(trouble):
    with FakeChatServer(lambda body, number: trouble if number < 2 else "Yes.") as fake:
        assert ask(fake).content == "Yes." and len(fake.requests) == 3
    with FakeChatServer(lambda body, number: trouble) as fake:
        with pytest.raises(RequestFailed, match=r"\(tried 3 times\)") as error:
            ask(fake)
        assert len(fake.requests) == 3 and not isinstance(error.value, RequestRefused)


def test_delays_double_and_follow_what_the_server_says(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_DELAY_SECONDS", 1.0)
    delays = []
    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", lambda seconds: delays.append(seconds))
    with FakeChatServer(lambda body, number: (429, {}, {"Retry-After": "7"}) if number == 1 else (500, {})) as fake, pytest.raises(RequestFailed):
        ask(fake, max_retries=8, stop=stop)
    assert delays == [1, 7, 4, 8, 16, 32, 60, 60]


def test_a_refused_request_is_not_repeated():
    with FakeChatServer(lambda body, number: (400, {"error": {"message": "maximum context length is 10"}})) as fake:
        with pytest.raises(RequestRefused, match=r"HTTP 400: .*maximum context length is 10"):
            ask(fake)
        assert len(fake.requests) == 1


def test_silence_is_a_failure_after_the_timeout():
    release = threading.Event()
    with FakeChatServer(lambda body, number: "late" if release.wait(5) else "") as fake:
        with pytest.raises(RequestFailed, match=r"no answer in 0.2 seconds \(request_timeout\) \(tried 2 times\)"):
            ask(fake, timeout=0.2, max_retries=1)
        release.set()


def test_a_lost_connection_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up():
            for _ in range(2):
                connection, _ = listener.accept()
                connection.recv(65536)
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        server = ChatServer(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "target", max_retries=1, timeout=5)
        with pytest.raises(RequestFailed, match=r"the connection was lost: .*\(tried 2 times\)"):
            server.answer(QUESTION, {})


def test_nobody_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    for ask_server in (lambda server: server.check(), lambda server: server.answer(QUESTION, {})):
        with pytest.raises(ServerUnreachable, match=f"the server {url} can't be reached: .*refused.*tried 3 times"):
            ask_server(ChatServer(url + "/", "target", max_retries=2))


@pytest.mark.parametrize(
    ("status", "words"), [(401, "api_key_env names"), (403, "api_key_env names"), (404, "server_model"), (307, "redirects to http")]
)
def test_what_no_request_can_change_ends_the_run(status, words):
    with FakeChatServer(lambda body, number: (status, {}, {"Location": "http://elsewhere/v1"})) as fake:
        with pytest.raises(ServerUnreachable, match=words):
            ask(fake, api_key="sk-1")
        assert len(fake.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_with_the_api_key(status):
    with FakeChatServer() as other:
        location = {"Location": f"{other.url}/models"}
        with FakeChatServer(lambda body, number: (status, {}, location)) as fake, pytest.raises(ServerUnreachable, match="redirects to http"):
            ask(fake, api_key="sk-1")
    assert other.requests == [] and other.got == []


def test_the_api_key_is_in_no_message():
    for status in (400, 401, 500):
        with FakeChatServer(lambda body, number, status=status: (status, {"error": "Incorrect API key provided: sk-SECRET"})) as fake:
            with pytest.raises((RequestFailed, ServerUnreachable), match=r"provided: \*\*\*") as error:
                ask(fake, api_key="sk-SECRET")
            assert "SECRET" not in str(error.value)


def test_the_model_must_be_there():
    with FakeChatServer(models=["a", "b"]) as fake:
        with pytest.raises(ValueError, match="has no model 'target', it has a, b; set server_model to one of these"):
            ChatServer(fake.url, "target").check()
        ChatServer(fake.url, "b").check()
        ChatServer(fake.url.removesuffix("/v1"), "target").check()  # has no list
    with FakeChatServer(models=[]) as fake:
        ChatServer(fake.url, "target").check()


def test_the_api_key_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", " sk-1\n")
    monkeypatch.setenv("BROKEN", "sk-1\nX-Other: 1")
    assert read_api_key(None) is None and read_api_key("MY_KEY") == "sk-1"
    with pytest.raises(ValueError, match="api_key_env='NO_KEY' names an environment variable that is not set"):
        read_api_key("NO_KEY")
    with pytest.raises(ValueError, match="BROKEN") as error:
        read_api_key("BROKEN")
    assert "sk-1" not in str(error.value)


def test_many_at_a_time_and_each_once():
    at_work, most, lock = 0, 0, threading.Lock()
    everyone = threading.Barrier(4, timeout=10)

    def converse(dialogue):
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        everyone.wait()
        with lock:
            at_work -= 1
        if dialogue.row == 5:
            raise RequestFailed("no")

    done = list(ask_all((Dialogue(i) for i in range(12)), converse, 4, threading.Event()))
    assert sorted(dialogue.row for dialogue, _ in done) == list(range(12)) and most == 4
    assert [(dialogue.row, str(error)) for dialogue, error in done if error is not None] == [(5, "no")]


def test_an_unreachable_server_ends_it_without_waiting_for_the_others():
    release, late = threading.Event(), []

    def converse(dialogue):
        if dialogue.row == 1:
            raise ServerUnreachable("gone")
        release.wait(20)
        late.append(dialogue.row)

    with pytest.raises(ServerUnreachable, match="gone"):
        list(ask_all((Dialogue(i) for i in range(8)), converse, 2, threading.Event()))
    assert late == []
    release.set()


def test_an_error_of_the_dialogues_is_raised():
    def broken():
        yield Dialogue(0)
        raise ValueError("row 1 is broken")

    with pytest.raises(ValueError, match="row 1 is broken"):
        list(ask_all(broken(), lambda dialogue: None, 2, threading.Event()))


def test_closing_it_stops_the_threads():
    stop = threading.Event()
    answers = ask_all((Dialogue(i) for i in range(1000)), lambda dialogue: stop.wait(0.01), 2, stop)
    next(answers)
    answers.close()
    assert stop.is_set()
