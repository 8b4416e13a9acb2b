"""One class for all pictures: live widget, still image and one line of text, from the same data, in one bundle.

A notebook that runs shows the widget; one that was only opened, a page on GitHub or a print shows the image; a screen
reader or a terminal reads the line. Source of the widget protocol: anywidget's `AnyWidget`.
"""

from __future__ import annotations

import base64
import io
from typing import Any, ClassVar

import anywidget
import numpy as np
import traitlets

from moe_course.viz.source import source, styles

__all__ = ["Picture", "png", "source", "styles"]


class Picture(anywidget.AnyWidget):
    """A picture of `data`.

    Attributes:
        data: plain JSON, sent to the browser once.
        opts: settings of the picture that are not data.
        state: what the viewer chose, e.g. `{"layer": 1, "token": 3}`. Set it to move the picture; read it to know.
    """

    module: ClassVar[str]
    data = traitlets.Dict().tag(sync=True)
    opts = traitlets.Dict().tag(sync=True)
    state = traitlets.Dict().tag(sync=True)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "module" in vars(cls):  # anywidget derives a class for each object, which already has both
            cls._esm, cls._css = source(cls.module), styles(cls.module)

    def text(self) -> str:
        """What the picture says, in one line that is the same in every run."""

    def still(self) -> bytes:
        """The picture as PNG; the same bytes for the same data."""

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, **keywords: Any) -> tuple[dict, dict]:
        bundle = super()._repr_mimebundle_(**keywords) or {}
        live, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        image = base64.b64encode(self.still()).decode()
        return live | {"text/plain": self.text(), "image/png": image}, metadata


def png(figure: Any, palette: int = 0) -> bytes:
    """A matplotlib figure as PNG, without the date and version that would make two runs differ.

    Args:
        palette: so many colours at most, for a file of a third of the size; 0 keeps all.
    """
    buffer = io.BytesIO()
    if not palette:
        figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    drawn.quantize(palette, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(buffer, format="png")
    return buffer.getvalue()
