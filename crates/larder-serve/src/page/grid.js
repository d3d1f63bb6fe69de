// The grid of experts: a canvas that redraws only the cells that change.
const UNLIT = 0, HIT = 1, MISS = 2, EVICTED = 3;
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

class Grid {
  constructor(canvas, layers, experts) {
    this.canvas = canvas;
    this.halfLife = 0.3;
    this.#begin(layers, experts);
    this.ink = canvas.getContext("2d");
    new ResizeObserver(() => this.fit()).observe(canvas);
    document.addEventListener("themechange", () => this.fit());
    canvas.onpointermove = (event) => this.setCursor(this.cellUnder(event));
    canvas.onpointerleave = () => this.setCursor(-1);
    canvas.onkeydown = (event) => this.moveCursor(event);
    canvas.onblur = () => this.setCursor(-1);
  }

  /** Shows the experts of another model. */
  setShape(layers, experts) {
    this.#begin(layers, experts);
    this.fit();
  }

  #begin(layers, experts) {
    Object.assign(this, { layers, experts });
    this.rows = new Map(layers.map((layer, row) => [layer, row]));
    const cells = layers.length * experts;
    this.resident = new Uint8Array(cells);
    this.kind = new Uint8Array(cells);
    this.heat = new Float32Array(cells);
    this.uses = new Uint32Array(cells);
    this.lit = new Set();
    this.cursor = -1;
    /** Counts by cell that are shown in place of what is in memory, and the largest of them. */
    this.counts = this.counts ? new Uint32Array(cells) : null;
    this.most = 0;
  }

  /** Recomputes sizes and colours and redraws everything. */
  fit() {
    const style = getComputedStyle(this.canvas);
    this.colours = ["--resident", "--hit", "--miss", "--evicted", "--absent", "--ink"].map((name) => style.getPropertyValue(name));
    const wide = this.canvas.clientWidth;
    this.tall = Math.max(wide / this.experts, Math.min(14, 300 / this.layers.length));
    const height = this.tall * this.layers.length;
    this.scale = window.devicePixelRatio;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(wide * this.scale);
    this.canvas.height = Math.round(height * this.scale);
    this.wide = wide / this.experts;
    for (let cell = 0; cell < this.kind.length; cell++) this.draw(cell);
  }

  /** Sets the resident experts, by layer. */
  setResident(resident) {
    this.resident.fill(0);
    for (const [layer, experts] of Object.entries(resident)) {
      for (const expert of experts) this.resident[this.cellOf(+layer, expert)] = 1;
    }
    for (let cell = 0; cell < this.kind.length; cell++) this.draw(cell);
  }

  /** Shows counts in place of what is in memory, or that again. */
  setCounts(counts) {
    this.counts = counts;
    this.most = counts?.reduce((most, count) => Math.max(most, count), 0) ?? 0;
    for (let cell = 0; cell < this.kind.length; cell++) this.draw(cell);
  }

  /** The experts that a layer's visit to the cache wanted. */
  expertsOf({ hit, awaited: inFlight, miss }) {
    return [...hit, ...inFlight, ...miss];
  }

  /** Shows one layer's visit to the cache. */
  visit({ layer, hit, awaited: inFlight, miss, evicted }) {
    for (const expert of hit) this.light(this.cellOf(layer, expert), HIT, 1);
    for (const expert of [...inFlight, ...miss]) this.light(this.cellOf(layer, expert), MISS, 1);
    for (const [owner, expert] of evicted) {
      // An expert that is evicted in the visit that read it is shown as the miss that it was.
      const isTransient = owner === layer && miss.includes(expert);
      this.light(this.cellOf(owner, expert), isTransient ? MISS : EVICTED, 0);
    }
  }

  light(cell, kind, resident) {
    if (cell === undefined) return;
    this.kind[cell] = kind;
    this.uses[cell] += resident;
    this.resident[cell] = resident;
    this.heat[cell] = 1;
    this.lit.add(cell);
    this.wake();
  }

  wake() {
    if (this.awake) return;
    this.awake = true;
    this.before = performance.now();
    this.frame();
  }

  /** Lit cells fade; with reduced motion they are redrawn twice per second instead. */
  frame() {
    const draw = (now) => {
      const fade = 2 ** (-Math.max(0, now - this.before) / 1e3 / this.halfLife);
      this.before = now;
      for (const cell of this.lit) {
        this.draw(cell);
        this.heat[cell] *= fade;
        if (this.heat[cell] < 0.04) this.unlight(cell);
      }
      this.awake = this.lit.size > 0;
      if (this.awake) this.frame();
    };
    if (reducedMotion.matches) setTimeout(() => draw(performance.now()), 500);
    else requestAnimationFrame(draw);
  }

  unlight(cell) {
    this.heat[cell] = 0;
    this.kind[cell] = UNLIT;
    this.lit.delete(cell);
    this.draw(cell);
  }

  draw(cell) {
    if (!this.colours) return;
    const { ink, scale } = this;
    const row = Math.floor(cell / this.experts), column = cell % this.experts;
    const gap = this.wide >= 5 ? Math.round(1.5 * scale) : this.wide >= 2.5 ? 1 : 0;
    const left = Math.round(column * this.wide * scale), right = Math.round((column + 1) * this.wide * scale);
    const top = Math.round(row * this.tall * scale), bottom = Math.round((row + 1) * this.tall * scale);
    const box = [left, top, Math.max(1, right - left - gap), Math.max(1, bottom - top - gap)];
    ink.clearRect(left, top, right - left, bottom - top);
    ink.fillStyle = this.colours[this.resident[cell] && !this.counts ? 0 : 4];
    ink.fillRect(...box);
    if (this.counts) this.tint(this.counts[cell], box);
    else if (this.kind[cell] !== UNLIT) this.glow(cell, box);
    if (cell === this.cursor) this.frameOf(box, this.colours[5], 1.5);
  }

  /** The more often an expert was visited, the stronger the colour; once is seen already. */
  tint(count, box) {
    if (!count) return;
    this.ink.globalAlpha = 0.15 + (0.85 * count) / this.most;
    this.ink.fillStyle = this.colours[1];
    this.ink.fillRect(...box);
    this.ink.globalAlpha = 1;
  }

  glow(cell, box) {
    const colour = this.colours[this.kind[cell]];
    this.ink.globalAlpha = this.heat[cell];
    this.ink.fillStyle = colour;
    if (this.kind[cell] === EVICTED && this.wide >= 5) this.frameOf(box, colour, 1);
    else this.ink.fillRect(...box);
    this.ink.globalAlpha = 1;
  }

  frameOf([left, top, width, height], colour, thick) {
    const line = Math.max(1, Math.round(thick * this.scale));
    this.ink.strokeStyle = colour;
    this.ink.lineWidth = line;
    this.ink.strokeRect(left + line / 2, top + line / 2, width - line, height - line);
  }

  cellOf(layer, expert) {
    const row = this.rows.get(layer);
    return row === undefined || !(expert >= 0 && expert < this.experts) ? undefined : row * this.experts + expert;
  }

  cellUnder(event) {
    const column = Math.floor(event.offsetX / this.wide), row = Math.floor(event.offsetY / this.tall);
    const isInside = column >= 0 && column < this.experts && row >= 0 && row < this.layers.length;
    return isInside ? row * this.experts + column : -1;
  }

  moveCursor(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.experts, ArrowDown: this.experts }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = this.cursor < 0 ? 0 : this.cursor + step;
    if (next >= 0 && next < this.kind.length) this.setCursor(next);
  }

  setCursor(cell) {
    const before = this.cursor;
    this.cursor = cell;
    for (const changed of [before, cell]) if (changed >= 0) this.draw(changed);
    this.describe?.(cell);
  }

  count() {
    return this.resident.reduce((sum, resident) => sum + resident, 0);
  }
}
