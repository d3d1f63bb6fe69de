"""How the page reads: its colours by choice."""

from .views import clean

DARK = "rgb(22, 22, 20)"
LIGHT = "rgb(250, 249, 246)"
PAPER = "getComputedStyle(document.body).backgroundColor"


def theme(test):
    """Colours of the system's choice or one's own, in all tabs, from the first paint on."""
    page = test.page
    # What the body looks like as soon as it exists, and whenever it is painted from then on.
    page.add_init_script("""window.painted = [];
        const look = () => {
            if (document.body) window.painted.push(getComputedStyle(document.body).backgroundColor);
            if (window.painted.length < 20) requestAnimationFrame(look);
        };
        look();
        new MutationObserver((_, observer) => document.body && (window.painted.push(getComputedStyle(document.body).backgroundColor), observer.disconnect()))
            .observe(document, { childList: true, subtree: true });""")
    page.emulate_media(color_scheme="dark")
    test.open()
    assert is_dark(page, True) and chosen(page) == "system"
    grid = test.grid()
    page.emulate_media(color_scheme="light")
    assert is_dark(page, False)
    test.until(f"document.querySelector('#grid').toDataURL() !== {grid!r}")
    page.get_by_role("radio", name="Dark").check()
    assert is_dark(page, True)
    test.until(f"document.querySelector('#grid').toDataURL() === {grid!r}")
    for path in ("/", "/#other"):
        page.goto("about:blank")
        test.open(path)
        assert is_dark(page, True) and chosen(page) == "dark"
        test.until("window.painted.length >= 20")
        assert set(page.evaluate("window.painted")) == {DARK}, page.evaluate("window.painted")
    with test.another_tab() as other:
        other.page.emulate_media(color_scheme="light")
        other.open()
        assert is_dark(other.page, True)
        other.page.get_by_role("radio", name="Dark").focus()
        other.page.keyboard.press("ArrowLeft")
        assert chosen(other.page) == "light" and is_dark(other.page, False)
        test.until(f"{PAPER} === {LIGHT!r}")
        assert chosen(page) == "light"
        page.get_by_role("radio", name="System").check()
        assert page.evaluate("localStorage.length") == 0
        other.until("document.querySelector('#theme :checked').value === 'system'")


def theme_against_the_system(test):
    """Both themes where the system has the other one; axe finds nothing."""
    page = test.open()
    for chosen_theme, system in (("Dark", "light"), ("Light", "dark")):
        page.emulate_media(color_scheme=system)
        page.get_by_role("radio", name=chosen_theme).check()
        test.answered("Some *text*, `code` and a [link](https://example.org).")
        test.send("The lighthouse")
        test.wait_until_written()
        clean(page, f"{chosen_theme}, system {system}")
        page.click("#settings-button")
        clean(page, f"{chosen_theme}, settings")
        page.click("#settings-button")


def theme_without_storage(test):
    """A browser that lets the page keep nothing: the choice holds until the page is closed."""
    page = test.page
    page.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } });")
    test.open()
    assert chosen(page) == "system"
    page.get_by_role("radio", name="Dark").check()
    assert is_dark(page, True)
    test.open()
    assert is_dark(page, False)


def chosen(page):
    return page.evaluate("document.querySelector('#theme :checked').value")


def is_dark(page, wanted):
    scheme = page.evaluate("getComputedStyle(document.documentElement).colorScheme")
    return (page.evaluate(PAPER), scheme) == ((DARK, "dark") if wanted else (LIGHT, "light"))
