"""Position ids and model inputs of conversations with images, computed by the policy's processor."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from nemo_gym.contract.errors import RowError
from nemo_gym.gateway.tokens.trajectories import Trajectory


def media_columns(processor: Any, trajectory: Trajectory) -> tuple[Any, dict[str, Any]]:
    """Return ``position_ids`` int64 [4, P + R] (text, time, height, width) and the processor's tensors, or
    ``(None, {})`` for a conversation of text alone or without a processor. Raises `RowError` for media that cannot
    be read.

    Args:
        processor: the policy's, of ``transformers``, with a tokenizer and ``get_rope_index``.
    """
    if processor is None or not trajectory.multimodal:
        return None, {}
    import torch

    ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.response_ids]], dtype=torch.long)
    images = [_image(item) for item in trajectory.multimodal]
    text = processor.tokenizer.decode(ids[0], skip_special_tokens=True)
    output = processor(text=[text], images=images, videos=None, return_tensors="pt", do_sample_frames=False)
    inputs = {name: value for name, value in dict(output).items() if name not in ("input_ids", "attention_mask")}
    grid = inputs.get("image_grid_thw")
    rope_inputs: dict[str, Any] = {"image_grid_thw": grid, "video_grid_thw": inputs.get("video_grid_thw")}
    if grid is not None:
        inputs["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
    if inputs.get("mm_token_type_ids") is not None:
        kinds = torch.zeros_like(ids)
        kinds[ids == processor.image_token_id] = 1
        rope_inputs["mm_token_type_ids"] = kinds
    mask = torch.ones_like(ids)
    vision, _ = processor.get_rope_index(input_ids=ids, attention_mask=mask, **rope_inputs)
    order = torch.arange(ids.shape[1], dtype=torch.long)[None]
    return torch.cat([order, vision[:, 0]], dim=0), inputs


def _image(item: Mapping[str, Any]) -> Any:
    from PIL import Image

    source = str(item["source"])
    if item["kind"] != "image" or not source.startswith("data:"):
        raise RowError(
            f"a trajectory holds {item['kind']} at {source[:60]!r}: positions are computed of images that were sent as"
            " data: URLs"
        )
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("RGB")
