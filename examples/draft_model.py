"""Let a pruned model draft for its own dense model: speculative decoding, whose answers are the dense model's.

    python examples/draft_model.py HuggingFaceTB/SmolLM2-135M wikitext2 out/draft --ratio 0.5 --max-model-len 2048

The draft proposes a few tokens, and the dense model checks all of them in one pass. It pays where the draft is much
faster than the dense model and often right. The dense model is served twice with vLLM, alone and with the draft, and
asked the same questions one after the other. Options that this script does not know go to both servers.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyprune import build_config, prune

PROMPTS = ("The sea was calm that morning, and", "def mean(values):", "Water boils at", "Dear Sir or Madam,")
START_S, ANSWER_S = 900.0, 600.0
"""vLLM compiles before it answers; --enforce-eager starts sooner."""


@dataclass(frozen=True)
class Served:
    """Token ids that one server answered, its tokens per second, and how many tokens were drafted and accepted."""

    answers: list[list[int]]
    speed: float
    drafted: int
    accepted: int


@contextmanager
def server(model: str, options: Sequence[str]) -> Iterator[str]:
    """Run `pyprune serve MODEL OPTIONS` and give its address once it is ready. Its log goes to stderr."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pyprune", "serve", model, "--host", "127.0.0.1", "--port", str(port), *options]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            wait_until_ready(process, address)
            yield address
        finally:
            process.terminate()


def wait_until_ready(process: subprocess.Popen[bytes], address: str) -> None:
    """Ask /health until it answers; end the script if the server does not start."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            ask(f"{address}/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
        else:
            return
    sys.exit(f"The server did not start (exit status {process.poll()}); its log is above.")


def ask(url: str, body: dict[str, object] | None = None) -> str:
    """The text at an address of the server; a body is posted as JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - http, see server
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
    with direct.open(request, timeout=ANSWER_S) as reply:
        return str(reply.read().decode())


def complete(address: str, prompt: str, new_tokens: int) -> list[int]:
    """The token ids of the most likely continuation of a prompt, always ``new_tokens`` of them."""
    wanted = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = json.loads(ask(f"{address}/v1/completions", {"prompt": prompt, **wanted}))
    return list(reply["choices"][0]["token_ids"])


def counter(metrics: str, name: str) -> int:
    """A counter of /metrics; 0 where the server has none of this name."""
    values = re.findall(rf"^vllm:{name}_total(?:\{{.*\}})? (\S+)$", metrics, flags=re.MULTILINE)
    return int(sum(map(float, values)))


def measure(model: str, new_tokens: int, options: Sequence[str]) -> Served:
    """Serve a model and ask it everything, after a first request that is not timed."""
    with server(model, options) as address:
        complete(address, PROMPTS[0], new_tokens)
        start = time.perf_counter()
        answers = [complete(address, prompt, new_tokens) for prompt in PROMPTS]
        seconds = time.perf_counter() - start
        metrics = ask(f"{address}/metrics")
    drafted, accepted = (counter(metrics, f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    return Served(answers, len(PROMPTS) * new_tokens / seconds, drafted, accepted)


def main() -> None:
    """Prune, serve the dense model alone and with its draft, and print how often that was right and both speeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a dense model")
    parser.add_argument("text", metavar="TEXT", help="text to prune with: wikitext2, ptb, c4, or a file")
    parser.add_argument("out", metavar="OUT", help="folder for the pruned checkpoint")
    parser.add_argument("--method", default="elder", help="any method of `pyprune prune --help`")
    parser.add_argument("--ratio", type=float, default=0.5, help="share to remove")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other option of pruning")
    parser.add_argument("--draft-tokens", type=int, default=3, help="tokens that the draft proposes at a time")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens generated for each prompt")
    args, options = parser.parse_known_args()

    config = build_config(
        options={"method": args.method, "ratio": args.ratio, "data.source": args.text}, settings=args.set
    )
    print(prune(args.model, config, out=args.out).plan.summary())

    speculation = json.dumps({"model": args.out, "num_speculative_tokens": args.draft_tokens})
    alone = measure(args.model, args.new_tokens, options)
    helped = measure(args.model, args.new_tokens, [*options, "--speculative-config", speculation])
    same = sum(one == other for one, other in zip(alone.answers, helped.answers, strict=True))
    if not helped.drafted:
        sys.exit("The second server drafted nothing; its log above says why.")
    share = helped.accepted / helped.drafted
    print(f"accepted: {helped.accepted} of {helped.drafted} drafted tokens ({share:.1%})")
    print(f"tokens per second: {alone.speed:.1f} alone, {helped.speed:.1f} with the draft")
    print(f"same answers: {same} of {len(PROMPTS)}")


if __name__ == "__main__":
    main()
