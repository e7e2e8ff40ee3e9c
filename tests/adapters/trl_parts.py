"""What AsyncGRPO runs on here: a tiny model with a character tokenizer, attention on the CPU, and an engine that
samples from the model behind the HTTP side of `vllm serve`.

``python trl_parts.py model FOLDER`` makes the model, ``python trl_parts.py engine FOLDER PORT`` serves it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.request
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CHARACTERS = "0123456789+-= ?.\nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:,<>/"
CONTEXT = 384


def make_model(folder: Path) -> None:
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    names = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>", *CHARACTERS]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(names),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,  # the smallest that vLLM takes on a CPU
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=names.index("<|im_end|>"),
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def serve_engine(folder: Path, port: int) -> None:
    """Seeds decide what is sampled: the same request gets the same answer while the weights are the same."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lock = threading.Lock()

    @torch.no_grad()
    def sample(ids: list[int], most: int, temperature: float, seed: int) -> tuple[list[int], list[float]]:
        dice = torch.Generator().manual_seed(seed % 2**31)
        tokens, logprobs, past, given = [], [], None, torch.tensor([ids])
        for _ in range(most):
            with lock:
                out = model(input_ids=given, past_key_values=past, use_cache=True)
            past = out.past_key_values
            chances = torch.log_softmax(out.logits[0, -1] / temperature, -1)
            token = int(torch.multinomial(chances.exp(), 1, generator=dice))
            tokens.append(token)
            logprobs.append(float(chances[token]))
            if token == model.config.eos_token_id:
                break
            given = torch.tensor([[token]])
        return tokens, logprobs

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer({"data": [{"max_model_len": CONTEXT}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            if self.path.startswith("/v1/completions"):
                of = asked["prompt"], asked["max_tokens"], asked["temperature"], asked["seed"]
                tokens, logprobs = sample(*of)
                choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
                return self.answer({"choices": [choice]})
            if self.path.startswith("/load"):
                with lock:
                    model.load_state_dict(load_file(asked["file"]), strict=False)
            return self.answer({})

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


class FileTransfer:
    """TRL's weight transfer: the weights as a file, and one request to the engine."""

    def __init__(self, url: str, file: Path) -> None:
        self._url, self._file = url, file

    def send_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        if os.environ.get("TRL_KEEPS_WEIGHTS"):  # the engine samples from those that it began with
            return
        save_file({name: tensor.detach().clone().contiguous() for name, tensor in named}, self._file)
        body = json.dumps({"file": str(self._file.absolute())}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self._url}/load", body), timeout=60).read()

    def init_weight_transfer(self) -> None:
        """Nothing to do, as in the others."""

    pause = resume = destroy = init_weight_transfer


class NoTransfer:
    """TRL's weight transfer for a trainer without an engine of its own: others load what it publishes."""

    def send_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _ in named:  # of sharded weights every rank has a part in each
            pass

    def init_weight_transfer(self) -> None:
        """Nothing to do, as in the others."""

    pause = resume = destroy = init_weight_transfer


def run_on_the_cpu() -> None:
    """Lets AsyncGRPO run without a GPU, and without vLLM's package: its tree attention, by plain torch."""
    import trl.experimental.async_grpo.async_grpo_trainer as trainer
    import trl.experimental.async_grpo.async_rollout_worker as worker
    import trl.experimental.async_grpo.packing as packing
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: Any = None, **tree: Any
    ) -> tuple[Any, None]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        of_queries, of_keys, outs = tree["tree_cu_seqlens_q"], tree["tree_cu_seqlens_k"], []
        for i in range(len(of_queries) - 1):
            q = query[:, :, of_queries[i] : of_queries[i + 1]]
            path = tree["tree_kv_index"][of_keys[i] : of_keys[i + 1]]
            k, v = key[:, :, path], value[:, :, path]
            length, reach = q.shape[2], k.shape[2]
            sees = torch.arange(reach)[None] <= torch.arange(reach - length, reach)[:, None]
            outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scaling))
        return torch.cat(outs, 2).transpose(1, 2).contiguous(), None

    def register() -> None:
        AttentionInterface.register(packing.TREE_ATTENTION, attention)
        AttentionMaskInterface.register(packing.TREE_ATTENTION, lambda **_: None)

    trainer.register_tree_attention = register
    trainer.get_peak_flops_per_device = lambda *_, **__: None
    worker.is_vllm_available = lambda *_, **__: True


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    if what == "model":
        make_model(Path(folder))
    else:
        serve_engine(Path(folder), int(rest[0]))
