"""The HTML report in Chromium, where there is one: it draws, its controls work, it prints."""

import base64
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from torch import nn

import covprop as cp
from covprop.report import page
from covprop.robustness import analyse
from tests.report.pages import NASTY, data_of, everything, gaussian, network, whole

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="no chromium and chromedriver: apt-get install chromium chromium-driver",
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1280,1000",
)  # fmt: skip
A4 = 688
"""Pixels between the margins of a page: 182 mm at 96 to the inch."""
POINTS = 72 / 96
"""In a pixel."""
LIGHT, DARK = [255, 255, 255], [20, 24, 29]


class Browser:
    """A page as a person has it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        self.driver.get(path.as_uri())
        assert self.all("html.drawn"), self.driver.get_log("browser")

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def select(self, choice: str, place: int) -> None:
        Select(self.one(f'select[data-choice="{choice}"]')).select_by_index(place)

    def hover(self, element: WebElement) -> str:
        ActionChains(self.driver).move_to_element(element).perform()
        self.driver.execute_async_script(  # it may have scrolled there, which hides the box
            "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        )
        ActionChains(self.driver).move_by_offset(2, 0).perform()
        return self.text("#tip")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def command(self, name: str, **options: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, options)

    def prefer(self, scheme: str) -> None:
        wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.command("Emulation.setEmulatedMedia", media="", features=features)

    @property
    def paper(self) -> list[int]:
        colour = self.one("body").value_of_css_property("background-color")
        return [int(part) for part in re.findall(r"\d+", colour)[:3]]

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER
        for flag in (*FLAGS, f"--user-data-dir={home}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        yield Browser(driver)
        driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything of a batch of three images."""
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
    )  # fmt: skip
    model = nn.Sequential(*layers).requires_grad_(False)
    x = cp.Gaussian.isotropic(torch.rand(3, 1, 6, 6), stddev=0.2, batch_dims=1)
    path = tmp_path_factory.mktemp("report") / "report.html"
    page.write(path, **everything(model, x) | {"model_name": NASTY})
    return path


@pytest.fixture
def shown(browser: Browser, report: Path) -> Browser:
    browser.prefer("light")
    browser.open(report)
    browser.complaints()
    return browser


def test_every_chart_is_drawn_without_complaint(browser: Browser, report: Path) -> None:
    browser.open(report)
    places = browser.all("[data-chart]")
    assert len(places) == 16
    for place in places:
        drawn = place.find_elements(By.CSS_SELECTOR, "svg, canvas, .panel")
        assert drawn, place.get_attribute("data-chart")
        assert drawn[0].size["width"] > 50
    assert browser.complaints() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


def test_names_are_shown_as_they_are(shown: Browser) -> None:
    assert shown.text("h1") == NASTY
    assert shown.run("return document.scripts.length") == 2
    assert shown.all("img") == []


def test_another_output_is_shown_when_it_is_chosen(shown: Browser) -> None:
    shown.select("output", 1)
    assert shown.text('[data-chart="density"] h3') == "output 1"
    before = shown.text('[data-chart="density"] dl')
    shown.select("output", 3)
    assert shown.text('[data-chart="density"] h3') == "output 3"
    assert shown.text('[data-chart="density"] dl') != before
    rows = shown.all('[data-chart="intervals"] g.choose')
    rows[2].click()
    assert shown.text('[data-chart="density"] h3') == "output 2"
    assert (
        Select(shown.one('select[data-choice="output"]')).first_selected_option.text == "output 2"
    )
    assert shown.complaints() == []


def test_another_step_is_shown_when_it_is_chosen(shown: Browser) -> None:
    shown.select("step", 1)
    assert shown.text('[data-chart="step"] h3') == "0 conv2d"
    menu = shown.one('select[data-choice="step"]')
    menu.send_keys(Keys.ARROW_DOWN)
    assert shown.text('[data-chart="step"] h3') == "1 relu"
    assert shown.all('[data-chart="step"] canvas')  # a picture of where its noise is
    focused = shown.run("return document.activeElement.dataset.choice")
    assert focused == "step"  # so that the next key goes on from here
    assert shown.complaints() == []


def test_another_input_is_shown_when_it_is_chosen(shown: Browser) -> None:
    def told() -> list[str]:
        names = ("density", "verdict", "classes")
        return [shown.text(f'[data-chart="{name}"]') for name in names]

    seen = []
    for place in range(3):
        shown.select("batch", place)
        seen.append(told())
    assert all(len({each[i] for each in seen}) == 3 for i in range(3))
    riskiest, *_ = shown.all('[data-chart="risks"] g.choose')
    name = riskiest.get_attribute("data-tip").splitlines()[0]
    riskiest.click()
    assert Select(shown.one('select[data-choice="batch"]')).first_selected_option.text == name
    assert shown.text('[data-chart="verdict"] h3').startswith(f"{name}: class ")
    assert shown.complaints() == []


def test_a_box_tells_the_value_under_the_pointer(shown: Browser, report: Path) -> None:
    shown.select("batch", 1)
    row = shown.one('[data-chart="intervals"] g[data-tip]')
    assert shown.hover(row).startswith("output 0\nmean ")
    told = shown.hover(shown.one('[data-chart="correlation"] canvas'))
    row, column, value = re.fullmatch(
        r"output (\d)\noutput (\d)\ncorrelation (\S+)", told
    ).groups()  # fmt: skip
    maps = data_of(report.read_text(encoding="utf-8"))["maps"]["elements"][1]
    expected = whole(maps["correlation"], 4)[int(row), int(column)]
    assert float(value.replace("−", "-")) == pytest.approx(float(expected), abs=1e-3)
    assert shown.hover(shown.one('[data-chart="steps"] rect[data-tip]')).startswith("input\n")
    shown.hover(shown.one("h1"))
    assert not shown.one("#tip").is_displayed()


def test_a_map_is_read_by_keys(shown: Browser) -> None:
    canvas = shown.one('[data-chart="covariance"] canvas')
    shown.run("arguments[0].focus()", canvas)
    readout = '[data-chart="covariance"] .readout'
    assert shown.text(readout).startswith("output 0 · output 0 · covariance")
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert shown.text(readout).startswith("output 2 · output 1 · covariance")
    canvas.send_keys(Keys.ENTER)
    assert shown.text('[data-chart="density"] h3') == "output 2"


def test_colours_follow_the_system_and_the_button(shown: Browser) -> None:
    assert shown.paper == LIGHT
    theme = shown.one("#theme")
    assert theme.get_attribute("aria-label") == "Use dark colours"
    theme.click()
    assert shown.paper == DARK
    theme.click()
    assert shown.paper == LIGHT
    shown.prefer("dark")
    shown.driver.refresh()
    assert shown.paper == DARK
    assert shown.one("#theme").get_attribute("aria-label") == "Use light colours"


def test_paper_is_light_and_has_all_tables(shown: Browser) -> None:
    shown.prefer("dark")
    shown.driver.refresh()
    shown.run("dispatchEvent(new Event('beforeprint'))")
    shown.command("Emulation.setEmulatedMedia", media="print", features=[])
    assert shown.paper == LIGHT
    assert all(table.is_displayed() for table in shown.all("details table"))
    assert not shown.one("nav").is_displayed()
    assert shown.text(".showing").startswith("Charts show input ")
    assert not any(hint.is_displayed() for hint in shown.all(".screen"))
    assert len(shown.all(".screen")) == 2
    sizes = shown.run(
        "return [...document.querySelectorAll('td, th, .scroll p')]"
        ".map(part => parseFloat(getComputedStyle(part).fontSize))"
    )
    assert min(sizes) * POINTS >= 8 - 1e-3
    shown.command(
        "Emulation.setDeviceMetricsOverride", width=A4, height=1000, deviceScaleFactor=1,
        mobile=False,
    )  # fmt: skip
    try:
        wide = shown.run(
            "return Math.max(document.documentElement.scrollWidth, "
            "...[...document.querySelectorAll('table')]"
            ".map(table => table.getBoundingClientRect().right))"
        )
        assert wide <= A4 + 1
    finally:
        shown.command("Emulation.clearDeviceMetricsOverride")
    shown.command("Emulation.setEmulatedMedia", media="", features=[])
    shown.run("dispatchEvent(new Event('afterprint'))")
    assert not any(table.is_displayed() for table in shown.all("details table"))
    pdf = base64.b64decode(shown.command("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert pdf.startswith(b"%PDF-")
    assert len(pdf) > 20_000
    assert shown.complaints() == []


def test_nothing_is_wider_than_a_narrow_screen(shown: Browser) -> None:
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    shown.command("Emulation.setDeviceMetricsOverride", **size)
    try:
        shown.driver.refresh()
        assert shown.run("return document.documentElement.scrollWidth") <= 400
    finally:
        shown.command("Emulation.clearDeviceMetricsOverride")


def test_without_a_script_the_numbers_can_be_read(shown: Browser) -> None:
    shown.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown.driver.refresh()
        assert "Charts need JavaScript" in shown.text("noscript")
        shown.one("#outputs summary").click()
        assert "output 0" in shown.text("#outputs table")
    finally:
        shown.command("Emulation.setScriptExecutionDisabled", value=False)


def test_every_control_has_a_name(shown: Browser) -> None:
    controls = shown.all("select, button, canvas, svg[role], [role=region]")
    for control in (control for control in controls if control.is_displayed()):
        assert control.accessible_name, control.get_attribute("outerHTML")[:100]


STRANGE = {
    "one number": cp.Gaussian(torch.tensor(1.0), torch.tensor([[0.1]])),
    "a constant": cp.Gaussian.constant(torch.ones(3)),
    "not a number": cp.Gaussian(
        torch.tensor([1.0, torch.nan, torch.inf]),
        torch.diag(torch.tensor([1.0, torch.nan, 0.0])), validate_args=False,
    ),
    "many": cp.Gaussian.isotropic(torch.linspace(-1, 1, 2000), stddev=0.1),
    "huge": cp.Gaussian.isotropic(torch.tensor([1e30, -1e-30]), stddev=1e15),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_strange_outputs_are_drawn(name: str, browser: Browser, tmp_path: Path) -> None:
    x = STRANGE[name]
    page.write(tmp_path / "page.html", model_name=name, x=x, y=x)
    browser.complaints()
    browser.open(tmp_path / "page.html")
    assert browser.complaints() == []


def test_a_decision_that_nothing_moves_is_drawn(browser: Browser, tmp_path: Path) -> None:
    x = gaussian()
    model = nn.Linear(3, 2).requires_grad_(False)
    model.weight.zero_()
    model.bias.copy_(torch.tensor([1.0, 0.0]))
    found = analyse(model, x, samples=100)
    page.write(tmp_path / "page.html", model_name="m", x=x, robustness=found)
    browser.complaints()
    browser.open(tmp_path / "page.html")
    assert browser.complaints() == []
    assert "kept up to the largest level" in browser.text('[data-chart="verdict"]')


def test_a_network_of_many_steps_is_drawn(browser: Browser, tmp_path: Path) -> None:
    layers = [part for _ in range(60) for part in (nn.Linear(3, 3), nn.ReLU())]
    model = nn.Sequential(*layers).requires_grad_(False)
    x = gaussian()
    page.write(tmp_path / "page.html", model_name="deep", x=x, trace=cp.trace(model, x))
    browser.complaints()
    browser.open(tmp_path / "page.html")
    assert browser.complaints() == []
    assert "121 steps" in browser.text('[data-chart="steps"]')


def test_an_empty_network_compares_with_itself(browser: Browser, tmp_path: Path) -> None:
    model = network()
    x = cp.Gaussian.constant(torch.zeros(3))
    comparison = cp.compare(model, x, methods=cp.Exact(), samples=100, show=False)
    page.write(tmp_path / "page.html", model_name="still", x=x, comparison=comparison)
    browser.complaints()
    browser.open(tmp_path / "page.html")
    assert browser.complaints() == []
