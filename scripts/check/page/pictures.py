"""The screenshots of the docs."""

from .engine import set_lambda

STORY = ["Tell me about the old house by the sea.", "What did the captain find in the chest?", "Describe a morning in the city.",
         "A letter from the lighthouse", "The road to the harbour"]


def take(test, folder, scheme):
    """During an answer, just after a change of λ, with other conversations in the list."""
    page = test.open()
    for text in reversed(STORY[1:]):
        page.click("#new-chat")
        test.set(temperature=0.7, top_p=0.9)
        test.ask(text, 60)
    page.click("#new-chat")
    test.set(temperature=0.7, top_p=0.9, max_tokens=1600)
    test.send(STORY[0])
    page.wait_for_timeout(500)
    set_lambda(test, 0.1)
    page.wait_for_timeout(700)
    page.mouse.move(560, 660)
    save(page, folder / f"page-{scheme}.png")
    page.keyboard.press("Escape")
    set_lambda(test, 0)


def conversations(test, folder):
    """Versions of messages and a search, without the engine panel."""
    page = test.open()
    page.click("#engine-button")
    for text in reversed(STORY):
        page.click("#new-chat")
        test.set(temperature=0.7, top_p=0.9)
        test.ask(text, 70)
    test.ask("And what about the lighthouse?", 50)
    test.answer().get_by_role("button", name="Regenerate").click()
    page.wait_for_selector(".answer.busy")
    test.wait_until_written()
    page.fill("#search", "lighthouse")
    page.wait_for_selector("#list mark")
    page.locator(".message.user").last.hover()
    page.wait_for_timeout(200)
    save(page, folder / "page-conversations.png")
    page.fill("#search", "")
    page.set_viewport_size({"width": 390, "height": 780})
    page.reload()
    page.wait_for_selector(".answer")
    page.wait_for_timeout(200)
    save(page, folder / "page-phone.png")


def save(page, path):
    page.screenshot(path=path)
    assert path.stat().st_size < 300_000, path.stat().st_size
