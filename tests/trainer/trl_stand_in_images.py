"""Models that read images, made here as those of `trl_stand_ins.py`, with their processors.

Of the models that TRL's tests name these have processors that need no torchvision.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from trl_stand_ins import SMALL, chat_template, write_repository


IMAGE, PATCH = 28, 7  # pixels a side
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 4, "image_size": IMAGE, "patch_size": PATCH}


def _text(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """The text model's settings, once the tokenizer has the tokens of the images."""
    return {
        **SMALL,
        "hidden_size": 16,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }


def _gemma3(tokenizer: Any) -> tuple[Any, Any]:
    """The config and the processor of a Gemma 3: 4 tokens for an image, between a token before and one after."""
    from transformers import AutoConfig, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer.add_tokens(list(names.values()), special_tokens=True)
    tokenizer._set_model_specific_special_tokens(names)
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": IMAGE, "width": IMAGE}),
        tokenizer,
        chat_template=chat_template("gemma3"),
        image_seq_length=4,
    )
    config = AutoConfig.for_model(
        "gemma3",
        text_config=_text(tokenizer, head_dim=4),
        vision_config={**VISION, "vision_use_head": False},  # the head has no part in what is generated
        mm_tokens_per_image=4,
        eos_token_id=tokenizer.eos_token_id,
        **{name + "_index": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )
    return config, processor


def _llava_next(tokenizer: Any) -> tuple[Any, Any]:
    """The config and the processor of a LLaVA-NeXT: an image is cut into tiles."""
    from transformers import AutoConfig, LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    tokenizer.add_tokens(["<image>"], special_tokens=True)
    grids = [[IMAGE, 2 * IMAGE], [2 * IMAGE, IMAGE], [2 * IMAGE, 2 * IMAGE]]
    size = {"height": IMAGE, "width": IMAGE}
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil(size={"shortest_edge": IMAGE}, crop_size=size, image_grid_pinpoints=grids),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=chat_template("llava_next"),
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    config = AutoConfig.for_model(
        "llava_next",
        text_config=_text(tokenizer, model_type="mistral"),
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_grid_pinpoints=grids,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
    )
    return config, processor


def write_image_models(hub: Path, tokenizer: Any) -> None:
    """Writes them with a tokenizer of Qwen's, to which each adds the tokens of its images."""
    import torch
    from transformers import AutoModelForImageTextToText

    for name, make in (("Gemma3", _gemma3), ("LlavaNext", _llava_next)):
        own = copy.deepcopy(tokenizer)
        own.chat_template = None  # the processor has one
        config, processor = make(own)
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
        write_repository(hub, f"tiny-{name}ForConditionalGeneration", model, processor)
