"""Answers through a server that speaks OpenAI's chat completions: vLLM, SGLang and others."""

import http.client
import json
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from hf_dspark.distillation.dialogues import Dialogue

__all__ = ["ChatServer", "RequestFailed", "RequestRefused", "ServerAnswer", "ServerUnreachable", "ask_all", "check_server_url", "read_api_key"]

_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 1.0, 60.0
# Too busy, or in trouble; the same request may succeed later.
_TRANSIENT = (408, 425, 429)
# What no other request of this run would change.
_FATAL = {
    401: "it wants another API key; api_key_env names the environment variable that holds it",
    403: "it refuses this API key; api_key_env names the environment variable that holds it",
    404: "check that server ends as the server's own documentation says (often /v1), and server_model",
}


class RequestFailed(Exception):
    """One request that can't be answered, in words."""


class RequestRefused(RequestFailed):
    """The server says that the request itself is wrong; asking again won't help."""


class ServerUnreachable(ConnectionError):
    """Nobody answers at the server's address, or not to this client: the other requests would fare no better."""


@dataclass(slots=True)
class ServerAnswer:
    """An answer: its text, the reasoning that the server keeps apart (None: none), and whether the target ended it itself."""

    content: str
    reasoning: str | None
    is_ended: bool


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the API key to another place."""

    def redirect_request(self, *_):
        return None


class ChatServer:
    """A server at `url` (such as http://localhost:8000/v1), asked for `model`. Its methods may be called from many threads.

    A request that meets a timeout, a lost connection, an unreadable answer, 429 or 5xx is repeated `max_retries` times, after 1, 2, 4,
    ... seconds, or as many as the server says.

    Args:
        api_key: sent as a bearer token, and kept out of all messages.
        timeout: seconds that the server may keep silent.
        stop: when set, waiting ends and requests fail.
    """

    def __init__(self, url: str, model: str, *, api_key: str | None = None, timeout: float = 600.0, max_retries: int = 5, stop=None):
        self.url, self.model, self.timeout, self.max_retries = url.rstrip("/"), model, timeout, max_retries
        self.stop = stop or threading.Event()
        self._api_key = api_key
        self._opener = urllib.request.build_opener(_NoRedirects)

    def check(self) -> None:
        """Asks for the list of models.

        Raises:
            ServerUnreachable: nobody answers.
            ValueError: the server does not have the model.
        """
        try:
            listed = self._request("/models", None)
            names = [entry["id"] for entry in listed["data"]]
        except (RequestFailed, LookupError, TypeError):
            return  # not every server has such a list
        if names and self.model not in names:
            listed = ", ".join(map(str, names[:5]))
            raise ValueError(f"the server {self.url} has no model {self.model!r}, it has {listed}; set server_model to one of these")

    def answer(self, messages: list[dict], options: dict) -> ServerAnswer:
        """What the model says to `messages`; `options` go into the request.

        Raises:
            RequestFailed: this request can't be answered, or not now.
            ServerUnreachable: no request can.
        """
        return self._request("/chat/completions", {"model": self.model, "messages": messages, **options}, _read_answer)

    def _request(self, path: str, body: dict | None, read: Callable = lambda payload: payload):
        delay = _FIRST_DELAY_SECONDS
        for attempt in range(self.max_retries + 1):
            try:
                return read(self._send(path, body))
            except urllib.error.HTTPError as error:
                wait = self._check_status(error, is_probe=body is None)
                failure = RequestFailed(f"HTTP {error.code}: {self._reason(error)}")
            except urllib.error.URLError as error:
                words = f"the server {self.url} can't be reached: {error.reason}; check its address, and that it is running"
                wait, failure = None, ServerUnreachable(words)
            except TimeoutError:
                wait, failure = None, RequestFailed(f"no answer in {self.timeout:g} seconds (request_timeout)")
            except (OSError, http.client.HTTPException) as error:
                wait, failure = None, RequestFailed(f"the connection was lost: {error or type(error).__name__}")
            except (ValueError, LookupError, TypeError) as error:
                wait, failure = None, RequestFailed(f"the answer is no chat completion: {error!r:.200}")
            if attempt < self.max_retries and self.stop.wait(min(wait or delay, _LONGEST_DELAY_SECONDS)):
                raise RequestFailed("the run was stopped")
            delay *= 2
        raise type(failure)(f"{failure} (tried {self.max_retries + 1} times)")

    def _send(self, path: str, body: dict | None):
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "hf-dspark"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        with self._opener.open(urllib.request.Request(self.url + path, data, headers), timeout=self.timeout) as response:
            return json.loads(response.read())

    def _check_status(self, error: urllib.error.HTTPError, is_probe: bool) -> float | None:
        """Seconds that the server asks to wait for, if it does; raises what waiting doesn't help against."""
        if error.code in _TRANSIENT or error.code >= 500:
            asked = error.headers.get("Retry-After") or ""
            return float(asked) if asked.isdigit() else None
        reason = f"HTTP {error.code}: {self._reason(error)}"
        if error.code in _FATAL and not (is_probe and error.code == 404):
            raise ServerUnreachable(f"the server {self.url} answers {reason}; {_FATAL[error.code]}") from None
        if error.code < 400:
            raise ServerUnreachable(f"the server {self.url} redirects to {error.headers.get('Location')}; set server to where it is") from None
        raise RequestRefused(reason) from None

    def _reason(self, error: urllib.error.HTTPError) -> str:
        """The start of what the server says, without the API key, which some repeat."""
        try:
            text = error.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            text = ""
        text = " ".join((text or str(error.reason)).split())
        return (text.replace(self._api_key, "***") if self._api_key else text)[:300]


def check_server_url(url: str) -> None:
    """Raises ValueError where `url` is no address of a server, or holds a password."""
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        raise ValueError(f"server must hold no name, password or query (api_key_env names the variable with the key), got one for {parts.hostname}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"server must be an address such as http://localhost:8000/v1, got {url!r}")


def read_api_key(variable: str | None) -> str | None:
    """The key in the environment variable `variable`; None: no key is sent.

    Raises:
        ValueError: the variable is not set, or holds what can't be sent.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"api_key_env={variable!r} names an environment variable that is not set; export it, or leave api_key_env out")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"the environment variable {variable} (api_key_env) holds something else than an API key: blanks or letters outside ASCII")
    return key


def ask_all(
    dialogues: Iterator[Dialogue], converse: Callable[[Dialogue], None], concurrency: int, stop: threading.Event
) -> Iterator[tuple[Dialogue, Exception | None]]:
    """Lets `concurrency` threads call `converse` on each dialogue; yields them as they are done, with the error that ended them or None.

    Raises:
        ServerUnreachable: from one of the calls; an answer that is on its way then is lost.
        Exception: what reading the dialogues raised.
    """
    lock, done = threading.Lock(), queue.Queue()

    def work() -> None:
        try:
            while not stop.is_set():
                with lock:
                    dialogue = next(dialogues, None)
                if dialogue is None:
                    break
                try:
                    converse(dialogue)
                    done.put((dialogue, None))
                except Exception as error:
                    done.put((dialogue, error))
        except Exception as error:
            done.put((None, error))
        finally:
            done.put(None)

    # They end with the program, even where one waits for an answer.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    num_working, fatal = concurrency, None
    try:
        # Behind an error that ends the run: what others are still waiting for may take minutes.
        while num_working and (fatal is None or not done.empty()):
            outcome = done.get()
            if outcome is None:
                num_working -= 1
                continue
            dialogue, error = outcome
            if dialogue is None or isinstance(error, ServerUnreachable):
                fatal = fatal or error
                stop.set()
            elif error is None or not stop.is_set():
                yield dialogue, error
    finally:
        stop.set()
    if fatal is not None:
        raise fatal


def _read_answer(payload) -> ServerAnswer:
    choice = payload["choices"][0]
    message = choice["message"]
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise TypeError(f"its content is {type(content).__name__}")
    return ServerAnswer(content, message.get("reasoning_content") or message.get("reasoning"), choice.get("finish_reason") != "length")
