"""From a row to the batch, counted by hand: pictures in their order, the mask of an answer, rewards by their rows."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from tiny_vlms import picture, processor_of
from transformers import AutoTokenizer

import rewards
import train_grpo as script
from config import TrainConfig
from inputs import vision
from inputs.trajectory import Completion
from rollouts import Trajectory, single_turn

pytestmark = pytest.mark.quick


def test_pictures_of_a_column_are_shown_in_its_order():
    """In a plain prompt before its text, else in the places that the prompt gives them; as the processor has them when
    it is called by hand."""
    processor = processor_of("qwen2_5_vl")
    first, second = picture(1, 84, 56), picture(2, 56, 84)
    mark = "<|vision_start|><|image_pad|><|vision_end|>"

    def by_hand(said: str) -> tuple[list[int], torch.Tensor]:
        text = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        made = processor(text=[text], images=[[first, second]], return_tensors="pt", add_special_tokens=False)
        assert made["image_grid_thw"].tolist() == [[1, 4, 6], [1, 6, 4]]
        return made["input_ids"][0].tolist(), made["pixel_values"]

    parts = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}, {"type": "text", "text": "?"}]
    generator = SimpleNamespace(tokenizer=processor, rope_index=None)
    for prompt, said in [("Which?", f"{mark}{mark}Which?"), ([{"role": "user", "content": parts}], f"{mark}or{mark}?")]:
        built = vision.build_prompt({"prompt": prompt, "images": [first, second]}, generator, TrainConfig())
        ids, pixels = by_hand(said)
        assert built.token_ids == ids
        assert torch.equal(built.model_inputs["pixel_values"], pixels)


class Answers:
    """A generator that gives these two answers to any prompt."""

    tokenizer = AutoTokenizer.from_pretrained("models/tiny")
    end = tokenizer.eos_token_id

    async def generate(self, prompt_ids, **options):
        return [
            Completion(ids, [-1.0] * len(ids), "stop", 0, prompt_ids) for ids in ([17, 18, self.end], [21, self.end])
        ]


def test_the_mask_has_the_sampled_tokens_and_the_one_that_ends_the_turn():
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "a"}]
    trajectories = asyncio.run(single_turn([{"prompt": messages}], Answers(), TrainConfig(num_generations=2)))
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    text = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    prompt, end = Answers.tokenizer(text, add_special_tokens=False)["input_ids"], Answers.end
    p = len(prompt)
    assert batch.input_ids.tolist() == [[*prompt, 17, 18, end], [*prompt, 21, end, 0]]
    assert batch.loss_mask.tolist() == [[0] * p + [1, 1, 1], [0] * p + [1, 1, 0]]
    assert batch.attention_mask.tolist() == [[1] * p + [1, 1, 1], [1] * p + [1, 1, 0]]


def test_each_completion_is_scored_with_the_columns_of_its_own_row():
    def right(completions, answer, bonus, **columns):
        return [float(c == a) + b for c, a, b in zip(completions, answer, bonus, strict=True)]

    rows = [{"prompt": "x", "answer": str(n), "bonus": n / 10} for n in range(3)]
    said = ["0", "2", "1", "1", "2", "0"]  # two completions of each row
    trajectories = [
        Trajectory(rows[n // 2], n // 2, [1], [5, 6], [1, 1], [0.0, 0.0], [0.0, 0.0], info={"completion": text})
        for n, text in enumerate(said)
    ]
    asyncio.run(rewards.score(trajectories, {"right": right}, TrainConfig(reward_funcs=["length"])))
    expected = [1.0, 0.0, 1.1, 1.1, 1.2, 0.2]
    assert [t.info["reward"] for t in trajectories] == pytest.approx(expected)
    assert [t.token_rewards for t in trajectories] == [[0.0, pytest.approx(value)] for value in expected]
