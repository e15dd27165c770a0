"""The page in a real browser: every panel is drawn, hovering and the arrow keys say what is there, nothing complains;
on a phone, in the dark, in print and for a screen reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoplan.plan import Plan
from autoplan.report.page import page
from autoplan.search import search
from tests.support import chromium
from tests.support.chromium import Chromium
from tests.support.layer_graphs import Dense, cluster, problem
from tests.support.mixed import group, mixed

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(chromium.found() is None, reason="no Chromium here: apt-get install chromium"),
]

PANELS = ("decision", "model", "axes", "cluster", "stages", "step", "timeline", "alternatives", "proof", "strategy")
# A page of more elements than this takes a browser seconds; 405 billion parameters on 16,384 GPUs stay below.
MOST_ELEMENTS = 15_000


def planned(layers: int = 12, *, gpus: int = 8, nodes: int = 1, **forced: object) -> Plan:
    each = [Dense(elements=20_000_000 + 100_000 * i, core=2**20) for i in range(layers)]
    keys = {"schedule": "1f1b", **forced}
    return search(problem(each, cluster(gpus, nodes=nodes), forced=keys, assumptions=("a guess",)))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    path.write_text(page(planned(pipeline=2, tensor=2)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a planned model: twelve stages, long names, a fingerprint of 64 letters."""
    path = tmp_path_factory.mktemp("pages") / "real.html"
    plan = Plan.load(Path(__file__).parents[2] / "docs" / "pipeline.json")
    assert len(plan.model.fingerprint) == 64 and len(plan.stages) == 12
    path.write_text(page(plan), encoding="utf-8")
    return path


def tip(browser: Chromium) -> str | None:
    return browser.run("document.getElementById('tip').textContent || null")


def test_every_panel_is_drawn_and_nothing_complains(browser: Chromium, file: Path) -> None:
    browser.open(file)
    for panel in PANELS:
        assert browser.run(f"document.getElementById('{panel}').closest('section').offsetHeight") > 60, panel
    for picture in ("graph", "machines", "pipeline", "scatter"):
        box = browser.run(
            f"(b => [b.width, b.height])(document.querySelector('svg.{picture}').getBoundingClientRect())"
        )
        assert box[0] > 500 and box[1] > 40, picture
    assert browser.errors == []
    assert browser.run("performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("svg.graph .box", "layers.0: layer 0, stage 0"),
        ("svg.machines .box", "rank 0: stage 0"),
        ("svg.pipeline rect.forward", "stage 0, forward of micro-batch 0"),
        ("svg.scatter .point.chosen", "the plan, "),
    ],
)
def test_hovering_says_what_is_there(browser: Chromium, file: Path, mark: str, said: str) -> None:
    browser.open(file)
    assert tip(browser) is None
    browser.hover(mark)
    assert (tip(browser) or "").startswith(said)
    browser.hover("h1")
    assert tip(browser) is None


def test_the_keyboard_reaches_every_picture_and_reads_it(browser: Chromium, file: Path) -> None:
    browser.open(file)
    reached = []
    for _ in range(30):
        browser.press("Tab")
        reached.append(browser.run("String(document.activeElement.getAttribute('class'))"))
    assert all(any(name in text for text in reached) for name in ("graph", "machines", "pipeline", "scatter"))
    browser.run("document.querySelector('svg.pipeline').focus()")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "End"):
        browser.press(key)
        said.append(tip(browser) or "")
    assert said[0].startswith("stage 0, forward of micro-batch 0")
    assert said[1].startswith("stage 0") and said[1] != said[0]
    assert said[2].startswith("stage 1") and "optimizer" in said[3]
    browser.press("Escape")
    assert tip(browser) is None and browser.errors == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("phone", [False, True], ids=["desk", "phone"])
def test_nothing_runs_off_the_screen_and_text_can_be_read(
    browser: Chromium, real: Path, phone: bool, dark: bool
) -> None:
    browser.open(real, width=375 if phone else 1100, phone=phone, dark=dark)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    page_is_dark = browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => +c < 80)")
    assert page_is_dark is dark
    assert browser.run(CONTRAST) == []


@pytest.mark.parametrize("width", [375, 718, 1100])
def test_several_kinds_and_branches_keep_their_tables_and_pictures_whole(
    browser: Chromium, tmp_path: Path, width: int
) -> None:
    """Names of kinds and of links are long: a table of them fits, but for what may be scrolled on a phone."""
    path = tmp_path / "kinds.html"
    path.write_text(page(of_kinds_with_branches()), encoding="utf-8")
    browser.open(path, width=width, phone=width < 400)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth") and browser.errors == []
    if width == 1100:
        assert browser.run("[...document.querySelectorAll('.scroll')].every(s => s.scrollWidth <= s.clientWidth)")
    texts = "[...document.querySelectorAll('svg.graph .box, svg.machines .box')]"
    inside = "(b => { const t = b.querySelector('text').getBoundingClientRect(), r = b.querySelector('rect')"
    inside += ".getBoundingClientRect(); return t.left >= r.left && t.right <= r.right; })"
    assert browser.run(f"{texts}.every({inside})")
    tapped = "[...document.querySelectorAll('svg.machines .box rect')].map(r => r.getBoundingClientRect().width)"
    if width < 400:
        assert browser.run(f"Math.min(...{tapped})") >= 23.5  # a finger finds it


def of_kinds_with_branches() -> Plan:
    fast = group(4, nodes=2, name="H100-80GB-SXM")
    slow = group(4, nodes=2, speed=0.5, memory_gib=12.0, name="A100-40GB-SXM")
    slow = dataclasses.replace(slow, inter=dataclasses.replace(slow.inter, name="100 Gb/s a GPU (your figures)"))
    layers = [Dense(flops=3e12, elements=20_000_000)] * 14
    keys = {"pipeline": 2, "data": 8}
    plan = search(problem(layers, mixed([fast, slow]), global_batch=64, heads=1, forced=keys))
    edges = (*((i, i + 1) for i in range(13)), *((1, i) for i in range(3, 14)), (2, 12), (5, 9))
    names = tuple(f"down_blocks.{i}.resnets" if i % 3 else f"transformer_blocks_{i}" for i in range(14))
    return dataclasses.replace(plan, model=dataclasses.replace(plan.model, edges=edges, layers=names))


# Texts whose colour is less than 4.5 times as light, or dark, as what they stand on (WCAG 2 AA), large ones apart.
CONTRAST = """(() => {
  const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => linear(v / 255));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
      if (!c.endsWith(", 0)")) return c; } return "rgb(255, 255, 255)"; };
  const poor = [];
  const texts = "p, td, th, li, dt, dd, h1, h2, pre, summary, caption, figcaption, small";
  for (const e of document.querySelectorAll(texts)) {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const said = e.textContent.trim();
    if (said && ratio < 4.5) poor.push(e.tagName + " " + said.slice(0, 30) + " " + ratio.toFixed(2));
  }
  return poor;
})()"""


def test_on_a_phone_a_stage_is_a_card_with_nothing_out_of_sight(browser: Chromium, real: Path) -> None:
    browser.open(real, width=375, phone=True)
    frame = "document.querySelector('table.stages').parentElement"
    assert browser.run(f"{frame}.scrollWidth <= {frame}.clientWidth")
    cells = "[...document.querySelectorAll('table.stages tbody tr > *')]"
    assert browser.run(f"{cells}.every(c => c.getBoundingClientRect().right <= innerWidth)")
    assert browser.run(f"{cells}.filter(c => c.dataset.is === 'parameters').length") == 12
    browser.open(real, width=1100)
    assert browser.run("getComputedStyle(document.querySelector('table.stages')).display") == "table"


def test_a_screen_reader_is_told_of_every_picture_and_table(browser: Chromium, file: Path) -> None:
    browser.open(file)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [(node.get("role", {}).get("value"), node.get("name", {}).get("value", "")) for node in nodes]
    pictures = [name for role, name in named if role in ("image", "img")]
    assert len(pictures) >= 4 and all(pictures)
    regions = [name for role, name in named if role == "region"]
    assert {"The model, by stage", "The cluster, and what travels on each link"} <= set(regions) and all(regions)
    headings = [name for role, name in named if role == "heading"]
    assert len(headings) >= len(PANELS) and all(headings)
    assert any(role == "status" for role, _ in named)
    assert browser.run("document.documentElement.lang") == "en"


def test_it_prints(browser: Chromium, real: Path) -> None:
    """On A4 (718 pixels between the margins) nothing is cut off, and what is folded on a screen is there."""
    browser.open(real, width=718)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("document.querySelector('.terms').getBoundingClientRect().height > 100")
    browser.open(real)
    pdf = browser.printed()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000


def test_the_largest_models_stay_light(browser: Chromium, tmp_path: Path) -> None:
    """A model of 126 layers in 16 stages, thousands of micro-batches, on 2,048 nodes."""
    small = planned(126, gpus=8, nodes=2, pipeline=16)
    strategy = dataclasses.replace(small.strategy, micro_batches=2048)
    (tmp_path / "large.html").write_text(page(dataclasses.replace(small, strategy=strategy)), encoding="utf-8")
    browser.open(tmp_path / "large.html")
    assert browser.run("document.querySelectorAll('*').length") < MOST_ELEMENTS
    assert browser.errors == []
