"""Elements of SVG as text.

Charts stretch with the page: x is in percent of their width, y and all text in pixels. So a phone
gets a narrower chart, not smaller letters, and a zoom is a wider chart.
"""

from __future__ import annotations

from markupsafe import Markup, escape


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """<name attributes>children</name>, escaped. `class_` is class, `stroke_width` stroke-width;
    an attribute that is None is left out, a float is rounded."""
    texts = [
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _text(value))
        for key, value in attributes.items()
        if value is not None
    ]
    inner = Markup("").join(children)
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(texts), inner)


def percent(share: float) -> str:
    """A share of the chart's width."""
    return f"{_number(share * 100)}%"


def chart(height: float, label: str, *children: str, **attributes: object) -> Markup:
    """The root of a chart: as wide as its place, `height` pixels high, read out as `label`."""
    return tag(
        "svg", *children, width="100%", height=height, role="img", aria_label=label, **attributes
    )


def label(x: str, y: float, text: str, class_: str = "", anchor: str | None = None) -> Markup:
    return tag("text", escape(text), x=x, y=y, class_=class_ or None, text_anchor=anchor)


def title(text: str) -> Markup:
    """What hovering over the element that holds it shows."""
    return tag("title", escape(text))


def _text(value: object) -> str:
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
