"""The engine panel: the grid, the rates, and the slider for λ."""

import json


def panel(test):
    page = test.open()
    still = test.grid()
    test.send("Tell me about the sea.")
    pictures = set()
    for _ in range(12):
        pictures.add(test.grid())
        page.wait_for_timeout(60)
    assert len(pictures - {still}) >= 6, "the grid does not move"
    test.until("parseFloat(document.querySelector('#speed').textContent) > 0")
    for id in ("hit-rate", "ssd"):
        test.until(f"parseFloat(document.querySelector('#{id}').textContent) > 0")
    assert page.evaluate("document.querySelector('#speed-line .line').getAttribute('d').length") > 10
    page.keyboard.press("Escape")
    test.until("document.querySelector('#state').textContent === 'ready'")
    page.wait_for_timeout(1500)
    resting = test.grid()
    page.wait_for_timeout(300)
    assert test.grid() == resting, "the grid does not come to rest"
    there = sum(map(len, test.state()["resident"].values()))
    assert page.locator("#cell").inner_text().startswith(f"{there} of "), page.locator("#cell").inner_text()


def lambda_slider(test):
    page = test.open()
    set_lambda(test, 0)
    test.send("Tell me about the road.")
    test.until("document.querySelector('#agreement-now').textContent === '100.0 %'")
    before = float(page.locator("#hit-rate").inner_text().split()[0])
    set_lambda(test, 0.4)
    assert test.state()["routing"] == "prior:lambda=0.4,j=1", test.state()["routing"]
    test.until("parseFloat(document.querySelector('#agreement-now').textContent) < 99.5")
    page.wait_for_timeout(2500)
    after = float(page.locator("#hit-rate").inner_text().split()[0])
    assert after > before + 5, (before, after)
    assert "V40" in page.evaluate("document.querySelector('#speed-line .mark').getAttribute('d')")
    page.keyboard.press("Escape")
    set_lambda(test, 0)


def many_experts(test):
    """48 layers of 128 experts, and events as fast as a browser can take them."""
    page, (layers, experts) = test.page, (48, 128)
    state = {"model": "large", "layers": list(range(layers)), "experts": experts, "experts_per_token": 8, "streams": True,
             "active": 0, "resident": {str(l): list(range(0, experts, 3)) for l in range(layers)}, "routing": "original",
             "lambda": 0.0, "agreement": 1.0}
    event = lambda step: {
        "step": step, "kind": "token", "queued": 0, "tokens_per_second": 100.0, "bytes_per_second": 1e9, "hit_rate": 0.5,
        "lambda": 0.0, "agreement": 1.0, "layers": [{
            "layer": l, "hit": [(step * 7 + l + k * 17) % experts for k in range(4)], "awaited": [],
            "miss": [(step * 11 + l + k * 29) % experts for k in range(4)],
            "evicted": [[l, (step * 13 + l + k * 31) % experts] for k in range(4)]} for l in range(layers)]}
    told = "".join(f"data: {json.dumps(event(step))}\n\n" for step in range(1, 61))
    page.route("**/engine", lambda route: route.fulfill(json=state))
    # All events come at once, sixty times the load of a frame; then the connection ends and is opened again.
    page.route("**/events", lambda route: route.fulfill(content_type="text/event-stream", body=told))
    page.add_init_script("""window.frames_ms = []; let before = 0;
        const next = (now) => { if (before) frames_ms.push(now - before); before = now; requestAnimationFrame(next); };
        requestAnimationFrame(next);""")
    page.goto(test.url)
    test.until("document.querySelector('#cell').textContent.includes('of 6144')")
    page.wait_for_timeout(1500)
    frames = sorted(page.evaluate("frames_ms"))
    print(f"   48 x 128: a frame takes {frames[len(frames) // 2]:.0f} ms (median), {frames[-1]:.0f} ms (max)")
    assert frames[len(frames) // 2] < 50, frames


def set_lambda(test, value):
    with test.page.expect_response(lambda response: "/engine" in response.url and response.request.method == "POST"):
        test.page.locator("#lambda").evaluate("(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }", value)
    test.until(f"document.querySelector('#lambda-value').textContent === '{value:.2f}'")
