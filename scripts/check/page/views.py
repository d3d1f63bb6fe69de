"""How the page is reached and seen: the keyboard alone, narrow and dark screens, axe on each view."""

from axe_playwright_python.sync_playwright import Axe


def keyboard_alone(test):
    """Everything that conversations offer, without a mouse."""
    page = test.open()
    page.keyboard.type("The lighthouse")
    page.keyboard.press("Enter")
    test.wait_until_streaming()
    page.keyboard.press("Escape")
    test.wait_until_written()
    tab_to(test, "document.activeElement.getAttribute('aria-label') === 'Edit this message'", "Shift+Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    page.keyboard.type(" at night")
    page.keyboard.press("Enter")
    test.wait_until_streaming()
    page.keyboard.press("Escape")
    test.wait_until_written()
    tab_to(test, "document.activeElement.getAttribute('aria-label') === 'Previous version'", "Shift+Tab")
    page.keyboard.press("Enter")
    assert test.texts()[0] == "The lighthouse"
    tab_to(test, "document.activeElement.id === 'search'", "Shift+Tab")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.className") == "open"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "menu-rename"
    # The list, which another tab changes meanwhile, keeps the button that the menu was opened with.
    page.evaluate("new BroadcastChannel('larder').postMessage({ kind: 'changed', subject: 'none' })")
    page.wait_for_timeout(300)
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "more"
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.keyboard.type("Light")
    page.keyboard.press("Enter")
    test.until_titles(["Light"])
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    for _ in range(3):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    test.until_titles([])
    test.until("document.activeElement.id === 'undo'")
    page.keyboard.press("Enter")
    test.until_titles(["Light"])


def tab_to(test, expression, key="Tab"):
    for _ in range(60):
        if test.page.evaluate(expression):
            return
        test.page.keyboard.press(key)
    raise AssertionError(f"not reached: {expression}")


def phone(test):
    test.page.set_viewport_size({"width": 390, "height": 780})
    page = test.open()
    assert page.locator("#engine").is_hidden() and page.locator("#side").is_hidden()
    test.send("Tell me about the harbour.", 60)
    page.click("#engine-button")
    assert page.locator("#engine").is_visible() and page.locator("#grid").bounding_box()["width"] > 250
    page.click("#engine-button")
    test.wait_until_written()
    fits(page)
    page.click("#side-button")
    assert page.locator("#side").is_visible() and page.evaluate("document.activeElement.id") == "side-close"
    assert page.evaluate("document.querySelector('main').inert")
    fits(page)
    page.keyboard.press("Escape")
    assert page.locator("#side").is_hidden() and page.evaluate("document.activeElement.id") == "side-button"
    page.click("#new-chat")
    page.click("#side-button")
    page.get_by_role("button", name="Tell me about the harbour.").first.click()
    page.wait_for_selector(".answer")
    assert page.locator("#side").is_hidden() and not page.evaluate("document.querySelector('main').inert")
    page.click("#settings-button")
    fits(page)
    assert page.locator("#prompt").bounding_box()["y"] < 780
    page.set_viewport_size({"width": 1280, "height": 800})
    test.until("!document.querySelector('#side').hidden")


def fits(page):
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.locator("#prompt").bounding_box()
    assert box["y"] + box["height"] < 780, box


def axe(test):
    """Each view of the page, light and dark, wide and narrow."""
    page = test.open()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            views(test, f"{scheme} {width}", width < 1000)


def views(test, where, is_narrow):
    page = test.page
    open_side = lambda: is_narrow and page.click("#side-button")
    close_side = lambda: is_narrow and page.keyboard.press("Escape")
    page.click("#new-chat")
    clean(page, f"{where} welcome")
    test.answered("Some *text*, `code` and a [link](https://example.org).\n\n```rust\nfn main() {}\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |",
                  context_use={"tokens": 4000, "size": 4096, "dropped_turns": 1, "dropped_tokens": 900, "shifts": 1})
    for text in ("The lighthouse", "And the harbour"):
        test.send(text)
        test.wait_until_written()
    test.answer().get_by_role("button", name="Regenerate").click()
    test.until("document.querySelector('.answer:last-child .versions') !== null")
    clean(page, f"{where} chat")
    page.locator(".message.user").last.hover()
    page.get_by_role("button", name="Edit this message").last.click()
    clean(page, f"{where} editor")
    page.keyboard.press("Escape")
    page.click("#settings-button")
    clean(page, f"{where} settings")
    page.click("#settings-button")
    open_side()
    clean(page, f"{where} side bar")
    page.fill("#search", "harbour")
    test.until("document.querySelector('#list mark') !== null")
    clean(page, f"{where} search")
    page.press("#search", "Escape")
    test.until("document.querySelector('#list mark') === null")
    page.locator("#list .more").first.click()
    clean(page, f"{where} menu")
    page.click("#menu-rename")
    clean(page, f"{where} renaming")
    page.keyboard.press("Escape")
    page.locator("#list .more").first.click()
    page.click("#menu-delete")
    page.wait_for_selector("#undo:focus")
    clean(page, f"{where} deleted")
    close_side()
    page.unroute("**/v1/chat/completions")


def clean(page, where):
    found = Axe().run(page).response["violations"]
    shown = [(each["id"], [node["html"][:120] for node in each["nodes"]][:3]) for each in found]
    assert not found, f"{where}: {shown}"
