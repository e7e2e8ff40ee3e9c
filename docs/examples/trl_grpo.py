"""TRL's GRPOTrainer, fed from steps: its losses, clipping, schedules and logging, on rollouts that others sampled.

torchrun --nproc-per-node 2 docs/examples/trl_grpo.py redis://host:6379 RUN MODEL_DIR OUTPUT_DIR STEPS
"""

import sys

import torch
from datasets import Dataset
from hf_trainer import BufferTrainer, train
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import rlbuffer


class BufferGRPO(GRPOTrainer):
    """Nothing is sampled and scored in here: a batch is this rank's part of a step."""

    def __init__(self, model, arguments, train_dataset, callbacks):
        prompts = Dataset.from_dict({"prompt": [""]})  # it insists on prompts and a reward, and asks for neither
        super().__init__(model, lambda **kwargs: [], arguments, prompts, callbacks=callbacks)
        self.train_dataset = train_dataset

    get_train_dataloader = BufferTrainer.get_train_dataloader

    def _prepare_inputs(self, inputs):
        step = inputs["step"]
        own = torch.tensor([len(step.samples())], device=self.args.device)
        most = int(self.accelerator.gather(own).max())  # its metrics want equally many rows on all ranks
        rows = step.padded(rows=most, pad_token_id=self.processing_class.pad_token_id)
        tensors = [torch.from_numpy(getattr(rows, name)).to(self.args.device) for name in TENSORS]
        ids, mask, trained, advantages, logprobs = tensors
        return {  # its prompt is the first token, which is never trained; what else is not trained is masked
            "prompt_ids": ids[:, :1].long(),
            "prompt_mask": mask[:, :1].long(),
            "completion_ids": ids[:, 1:].long(),
            "completion_mask": mask[:, 1:].long(),
            "tool_mask": trained[:, 1:].long(),
            "advantages": advantages[:, 1:],
            "old_per_token_logps": logprobs[:, 1:],
            "num_items_in_batch": torch.tensor(max(1, rows.normalizers.loss_tokens)),  # of all ranks: "dapo"
        }


TENSORS = ("input_ids", "attention_mask", "loss_mask", "advantages", "logprobs")


def main(url, run, path, output, steps):
    arguments = GRPOConfig(
        output,
        max_steps=steps,
        loss_type="dapo",
        bf16=False,  # as the workers sample
        disable_dropout=True,  # with it the trained policy would not be the one that sampled
        epsilon_high=0.28,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=10,
        save_total_limit=2,
        logging_strategy="no",
        report_to=[],
    )
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, use_safetensors=True)
    place = arguments.process_index, arguments.world_size
    with rlbuffer.connect(url, run=run) as buffer, buffer.reader(*place) as reader:
        train(model, buffer, reader, arguments, BufferGRPO)


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
