"""One page of HTML from traces: it needs no network, no server and no torch.

from attn_ext.profile import report

page = report.html(report.load(["profile"]))

model     files -> groups of rows, each with its trace
cards     the figures at the top of a group
page      groups -> HTML, by templates/
"""

from __future__ import annotations

from attn_ext.profile.report.model import Group, Report, Source, load
from attn_ext.profile.report.page import html

__all__ = ["Group", "Report", "Source", "html", "load"]
