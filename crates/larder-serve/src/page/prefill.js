// How much of a prompt is computed, and how long the rest takes.
/** Nothing is said of a prompt before this time. */
const LONG_PROMPT_MS = 2000;

class Prefill {
  /** Events of the newer half of the time: later tokens of a prompt have more to attend to than the first. */
  #events = [];

  /** Takes an event of the server, and returns what to say: nothing of a prompt that takes short or is done. */
  read({ total, processed, time_ms }) {
    this.#events.push({ processed, time_ms });
    while (this.#events[1]?.time_ms <= time_ms / 2) this.#events.shift();
    if (time_ms < LONG_PROMPT_MS || processed >= total) return "";
    const done = `Reading the prompt: ${processed} of ${total} tokens`;
    const rate = this.#perSecond();
    return rate > 0 ? `${done}, ${rate.toFixed(1)} tokens/s, ${formatLeft((total - processed) / rate)} left` : done;
  }

  #perSecond() {
    const [first, last] = [this.#events[0], this.#events.at(-1)];
    return (1000 * (last.processed - first.processed)) / Math.max(last.time_ms - first.time_ms, 1);
  }
}

/** A time in whole seconds, a begun one as a whole one. */
function formatLeft(time) {
  const seconds = Math.ceil(time);
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${seconds % 60} s` : `${seconds} s`;
}
