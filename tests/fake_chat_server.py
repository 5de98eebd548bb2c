"""A chat server in a thread of this process, which answers as the test says and remembers what it was asked."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeChatServer:
    """`respond(body, number)` gives the answer to the request `number`: a text, (text, finish_reason), a message (dictionary), bytes that are
    sent as they are, or an HTTP status with a text and headers. `requests`: (path, headers, body); `got`: paths of GET
    requests. A context manager; `url` ends in /v1."""

    def __init__(self, respond=lambda body, number: "Yes.", models=("target",)):
        self.respond, self.models = respond, models
        self.requests, self.got, self.lock = [], [], threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                fake.got.append(self.path)
                self.send(200, {"data": [{"id": name} for name in fake.models]} if self.path == "/v1/models" else {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.requests.append((self.path, dict(self.headers), body))
                    number = len(fake.requests) - 1
                answer = fake.respond(body, number)
                if isinstance(answer, tuple) and isinstance(answer[0], int):
                    self.send(*answer)
                elif isinstance(answer, bytes):
                    self.send(200, answer)
                else:
                    text, reason = answer if isinstance(answer, tuple) else (answer, "stop")
                    message = text if isinstance(text, dict) else {"role": "assistant", "content": text}
                    self.send(200, {"choices": [{"message": message, "finish_reason": reason}]})

            def send(self, status, content, headers=()):
                content = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in dict(headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                """Nothing on stderr."""

            def handle(self):
                try:
                    super().handle()
                except ConnectionError:
                    """The client did not wait."""

        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.httpd.server_address[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.httpd.shutdown()
        self.httpd.server_close()

    def questions(self) -> list[str]:
        """What the user said last in each request, in the order in which they came."""
        return [body["messages"][-1]["content"] for _, _, body in self.requests]
