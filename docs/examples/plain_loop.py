"""A trainer of your own under torchrun, with DDP and nothing of rlbuffer's trainer. Started again, it goes on.

torchrun --nproc-per-node 2 docs/examples/plain_loop.py redis://host:6379 RUN MODEL_DIR OUTPUT_DIR STEPS
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import rlbuffer

SAVE_EVERY = 10


def loss_of(model, mb):
    """Policy gradient with a clipped ratio, over the trained tokens of the whole step, all ranks together."""
    # Positions that begin again keep a row's rollouts apart, but only with no mask and no cache: see the page.
    out = model(input_ids=mb.input_ids[None], position_ids=mb.position_ids[None], use_cache=False)
    logprobs = -cross_entropy(out.logits[0], mb.targets, reduction="none")  # at t: of token t + 1
    trained = mb.loss_mask.nonzero()[:, 0]
    ratio = torch.exp(logprobs[trained - 1] - mb.logprobs[trained])
    advantages = mb.advantages[trained]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return -gain.sum() / max(1, mb.normalizers.loss_tokens)  # 0: nothing of the step is trained


def main(url, run, path, output, steps):
    dist.init_process_group("gloo")
    # in eval mode: without dropout
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", trust_remote_code=False, use_safetensors=True
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoint = Path(output) / "checkpoint.pt"
    with rlbuffer.connect(url, run=run) as buffer, buffer.reader(rank, world_size) as reader:
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            reader.load_state_dict(saved["reader"])
        buffer.policy.publish(model, reader.step, Path(output) / "weights")  # what workers sample with first
        for step in reader.steps(last=steps):
            for mb in step:  # one forward pass of `ddp` for each, whatever is in it: the other ranks wait in backward
                mb.backward(loss_of(ddp, mb.to("cpu")))
            optimizer.step()
            optimizer.zero_grad()
            buffer.policy.publish(model, step.number, Path(output) / "weights")
            reader.trained(step)  # before the checkpoint, so that the reader's state is of the same step
            if rank == 0 and (step.number % SAVE_EVERY == 0 or step.number == steps):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"reader": reader.state_dict()}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
                reader.checkpointed(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
