"""A trainer of your own under torchrun, with DDP and nothing of rlbuffer's trainer.

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
from rlbuffer.weights.files import publish


def loss_of(model, mb):
    """Policy gradient with a clipped ratio, over the trained tokens of the whole step, all ranks together."""
    sees = torch.from_numpy(mb.attention_mask())  # a row's rollouts do not see each other
    mask = torch.where(sees, 0.0, -torch.inf)[None, None]
    out = model(input_ids=mb.input_ids[None], position_ids=mb.position_ids[None], attention_mask=mask, use_cache=False)
    logprobs = -cross_entropy(out.logits[0], mb.targets, reduction="none")  # at t: of token t + 1
    trained = mb.loss_mask.nonzero()[:, 0]
    ratio = torch.exp(logprobs[trained - 1] - mb.logprobs[trained])
    advantages = mb.advantages[trained]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return -gain.sum() / mb.normalizers.loss_tokens


def main(url, run, path, output, steps):
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with rlbuffer.connect(url, run=run) as buffer:
        reader = buffer.reader(rank, world_size)
        for step in reader.steps():  # asking for the next acknowledges the last as trained
            for mb in step:
                (loss_of(ddp, mb.to("cpu")) * world_size).backward()  # DDP averages over ranks: undo it
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                state, config = model.state_dict(), model.config.to_dict()
                made = publish(Path(output), step.number, state=state, config=config, keep=4)
                buffer.policy().announce(step.number, location=made.location, size=made.size, checksum=made.checksum)
            if step.number == steps:
                reader.trained(step)
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
