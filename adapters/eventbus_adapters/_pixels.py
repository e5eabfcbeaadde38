"""Images of any library as pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eventbus_engine.errors import ConfigurationError

__all__ = ["Pixels", "copy_images", "pixels_of", "png"]

Pixels = NDArray[np.uint8]


def copy_images(images: Any) -> NDArray[Any] | list[Any]:
    """The images as they are now: an array; of a list, a list of arrays.

    Args:
        images: a tensor, an array, or a list of those.
    """
    if isinstance(images, list | tuple):
        return [copy_images(image) for image in images]
    if hasattr(images, "detach"):
        images = images.detach()
        # numpy has no bfloat16.
        images = (images.float() if images.is_floating_point() else images).cpu().numpy()
    return np.array(images)


def pixels_of(images: NDArray[Any] | list[Any], channels_last: bool) -> list[Pixels]:
    """Each image as (H, W, C) bytes, C being 1, 3 or 4. Floats are taken to be from 0 to 1, integers from 0 to 255.

    Args:
        images: what `copy_images` has made of one image or several: (H, W), (C, H, W), (N, C, H, W), or lists of them.
        channels_last: whether C comes last in these.

    Raises:
        ConfigurationError: these are no images.
    """
    # What a spool has kept is no array, but may be taken for one.
    images = images if isinstance(images, list) else np.asarray(images)
    if isinstance(images, list) or images.ndim == 4:
        return [pixels for image in images for pixels in pixels_of(image, channels_last)]
    shaped = images[..., None] if images.ndim == 2 else images
    if images.ndim == 3 and not channels_last:
        shaped = np.moveaxis(images, 0, -1)
    if shaped.ndim != 3 or shaped.shape[-1] not in (1, 3, 4):
        order = "(H, W, C)" if channels_last else "(C, H, W)"
        raise ConfigurationError(
            f"an image has the shape {images.shape}; with channels_last={channels_last} give {order}, C being 1, 3 or 4"
        )
    scaled = shaped if np.issubdtype(shaped.dtype, np.integer) else np.nan_to_num(shaped.astype(np.float64)) * 255
    return [np.clip(np.rint(scaled), 0, 255).astype(np.uint8)]


def png(pixels: Pixels) -> bytes:
    """The image as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, format="png")
    return file.getvalue()
