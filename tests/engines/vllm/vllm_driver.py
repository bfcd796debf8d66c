"""A child process that owns one vLLM engine and answers commands, one JSON object a line.

Run as `vllm_driver.py REPLY_FD SPEC_JSON`: commands come on stdin, answers go to the descriptor,
what vLLM prints goes wherever stdout and stderr go.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

_RESET_S = 60.0  # pages are held while blocks are saved; a reset succeeds once they are free
_DRAIN_S = 120.0
_PAUSE_S = 0.05


class Driver:
    """The engine and the operations on it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**spec)

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """Greedy tokens of each prompt, and how many prompt tokens came from a cache."""
        outputs = self.llm.generate(
            [self._prompt(ids, command) for ids in command["prompts"]],
            self._params(command),
            use_tqdm=False,
            lora_request=self._lora(command),
        )
        return {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "cached": [o.num_cached_tokens or 0 for o in outputs],
            "finish": [o.outputs[0].finish_reason for o in outputs],
        }

    def start(self, command: dict[str, Any]) -> dict[str, Any]:
        """Adds requests without waiting for them."""
        ids = []
        for i, prompt in enumerate(command["prompts"]):
            name = f"{command['name']}-{i}"
            self.llm.llm_engine.add_request(
                name, self._prompt(prompt, command), self._params(command)
            )
            ids.append(name)
        return {"ids": ids}

    def abort(self, command: dict[str, Any]) -> dict[str, Any]:
        """Aborts requests by the names that `start` gave."""
        time.sleep(command.get("after_s", 0.0))
        self.llm.llm_engine.abort_request(command["ids"])
        return {"unfinished": self.llm.llm_engine.get_num_unfinished_requests()}

    def drain(self, command: dict[str, Any]) -> dict[str, Any]:
        """Steps until nothing is left; returns the tokens of what finished."""
        del command
        engine, done = self.llm.llm_engine, {}
        deadline = time.monotonic() + _DRAIN_S
        while engine.has_unfinished_requests():
            if time.monotonic() > deadline:
                raise TimeoutError("requests did not finish")
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
        return {"tokens": done}

    def reset(self, command: dict[str, Any]) -> dict[str, Any]:
        """Empties the engine's own prefix cache, once no page is held any more."""
        del command
        deadline = time.monotonic() + _RESET_S
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise TimeoutError("pages stay in use, so the prefix cache cannot be reset")
            time.sleep(_PAUSE_S)
        return {}

    def metrics(self, command: dict[str, Any]) -> dict[str, Any]:
        """Counters and gauges that concern Kvist, external hits and preemption.

        `LLM.get_metrics` shows only names that begin with `vllm:`, so the page itself is read.
        """
        from prometheus_client import REGISTRY

        del command
        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            if not any(word in family.name for word in ("kvist", "external", "preempt")):
                continue
            for sample in family.samples:
                if sample.name.endswith(("_created", "_bucket", "_sum", "_count")):
                    continue
                labels = sample.labels.items()
                label = "".join(f".{v}" for k, v in labels if k not in ("engine", "model_name"))
                found[sample.name.removesuffix("_total") + label] = sample.value
        return found

    def quit(self, command: dict[str, Any]) -> dict[str, Any]:
        """Shuts the engine down; its connector flushes."""
        del command
        self.llm.llm_engine.engine_core.shutdown()
        return {}

    @staticmethod
    def _prompt(ids: list[int], command: dict[str, Any]) -> Any:
        from vllm.inputs import TokensPrompt

        if command.get("salt"):
            return TokensPrompt(prompt_token_ids=ids, cache_salt=command["salt"])
        return TokensPrompt(prompt_token_ids=ids)

    @staticmethod
    def _params(command: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=command["max_tokens"], ignore_eos=True, detokenize=False
        )

    @staticmethod
    def _lora(command: dict[str, Any]) -> Any:
        from vllm.lora.request import LoRARequest

        path = command.get("lora")
        if path is None:
            return None
        # the same number for the same folder, another for another
        return LoRARequest(os.path.basename(path), int(path.rsplit("-", 1)[1]), path)


def main() -> None:
    """Builds the engine, says so, and serves commands until `quit` or the end of stdin."""
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)

    def answer(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")

    driver = Driver(json.loads(sys.argv[2]))
    answer({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(getattr(driver, command["op"])(command))
        except Exception as error:  # noqa: BLE001 - the edge of a process: the parent raises it
            answer({"error": f"{type(error).__name__}: {error}"})
        if command["op"] == "quit":
            return


if __name__ == "__main__":
    main()
