"""A trainer that packs for itself: it takes whole groups from a stream until a token budget is full. Started again, it
goes on.

python docs/examples/stream_loop.py redis://host:6379 RUN MODEL_DIR OUTPUT_DIR UPDATES
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import rlbuffer

BUDGET, SAVE_EVERY = 600, 5
"""Tokens of an update, and updates between two checkpoints."""


def samples_of(taken):
    """The sequences of a group with an advantage each: the leader's, by `batcher.advantage`."""
    for rollout, advantage in zip(taken.rollouts, taken.advantages, strict=True):
        for sequence in rollout.sequences:
            yield sequence, advantage


def loss_of(model, samples):
    """Policy gradient with a clipped ratio over the trained tokens of the update; one sequence a row."""

    def rows(values):
        return pad_sequence([torch.tensor(value) for value in values], batch_first=True)

    ids = rows([sequence.tokens for sequence, _ in samples]).long()
    trained = rows([sequence.loss_mask for sequence, _ in samples])[:, 1:]
    old = rows([sequence.logprobs for sequence, _ in samples])[:, 1:]
    advantages = torch.tensor([advantage for _, advantage in samples])[:, None]
    mask = rows([[1] * len(sequence.tokens) for sequence, _ in samples])
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logprobs = -cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    ratio = torch.exp(logprobs - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return -(gain * trained).sum() / trained.sum()


def main(url, run, path, output, updates):
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, use_safetensors=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint, done, state = Path(output) / "checkpoint.pt", 0, rlbuffer.Stream.BEGINNING
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done, state = saved["updates"], json.loads(saved["stream"])
    if done >= updates:
        return
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with rlbuffer.connect(url, run=run) as buffer, buffer.stream() as stream:
        stream.resume(state)
        buffer.policy.publish(model, stream.version(done), checkpoint.parent / "weights")
        batch, tokens = [], 0
        for taken in stream:
            batch.append(taken)
            tokens += sum(len(sequence.tokens) for sequence, _ in samples_of(taken))
            if tokens < BUDGET:
                continue
            loss_of(model, [sample for group in batch for sample in samples_of(group)]).backward()
            optimizer.step()
            optimizer.zero_grad()
            done, batch, tokens = done + 1, [], 0
            stream.trained(taken.place)  # before the checkpoint, so that its state is of the same update
            if done % SAVE_EVERY == 0 or done == updates:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "updates": done}
                torch.save(state | {"stream": json.dumps(stream.state)}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
                stream.checkpointed()
            buffer.policy.publish(model, stream.version(done), checkpoint.parent / "weights")
            if done == updates:
                break


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
