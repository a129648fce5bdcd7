/*
 * Follows GET /lease/events for ever: goes on behind the last event after every break, starts over when the server says
 * that it cannot. EventSource could not send the key.
 */

import { ApiError, ask, events, get } from "./api.js";
import { numberOf } from "./state.js";

const SILENT = 45_000; // the server shows life every 15 s
const WAITS = [500, 1000, 2000, 5000, 10_000];
const LOOK = 15_000;

/**
 * `state` is kept up to date; `changed()` is called when it has changed. `link(status)` hears {name: "live"},
 * {name: "lost", at, error} with the time of the next try, {name: "key"} when the server wants one, {name: "hidden"}.
 */
export class Feed {
  constructor(state, changed, link) {
    this.state = state;
    this.changed = changed;
    this.link = link;
    this.last = null;
    this.tries = 0;
    this.abort = null;
    this.wake = null;
    this.paused = false;
    this.fetching = false;
    this.again = null;
  }

  async run() {
    for (;;) {
      if (this.paused) {
        this.link({ name: "hidden" });
        await new Promise((resolve) => {
          this.wake = resolve;
        });
        continue;
      }
      const error = await this.#once();
      if (this.paused) continue;
      this.state.freeze();
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        this.link({ name: "key", error });
        await new Promise((resolve) => {
          this.wake = resolve;
        });
      } else {
        const pause = WAITS[Math.min(this.tries, WAITS.length - 1)];
        this.tries += 1;
        this.link({ name: "lost", at: Date.now() + pause, error });
        await new Promise((resolve) => {
          this.wake = resolve;
          setTimeout(resolve, pause);
        });
      }
    }
  }

  /** Do not wait any longer: there is a key, or somebody asked. */
  retry() {
    this.wake?.();
  }

  /** A page that nobody sees holds no connection; it goes on where it stopped. */
  pause(paused) {
    this.paused = paused;
    if (paused) this.abort?.abort();
    else this.wake?.();
  }

  /** Look at the whole state soon; it has what events do not tell: rooms, what is resident, rules. */
  look(delay = 1000) {
    if (this.again !== null) return;
    this.again = setTimeout(() => {
      this.again = null;
      this.#state().catch(() => {}); // if the server has gone, the stream knows it, too
    }, delay);
  }

  async #state() {
    if (this.fetching) return this.look();
    this.fetching = true;
    try {
      this.state.merge(await get("lease"));
      this.changed();
    } finally {
      this.fetching = false;
    }
  }

  /** One connection, until it ends; returns why. */
  async #once() {
    this.abort = new AbortController();
    const stop = () => this.abort.abort();
    let silence = setTimeout(stop, SILENT);
    const regular = setInterval(() => this.look(0), LOOK);
    try {
      const headers = this.last === null ? {} : { "Last-Event-ID": this.last };
      const response = await ask("lease/events", { headers, signal: this.abort.signal });
      if (this.last === null) this.state.clear();
      await this.#state();
      this.state.thaw();
      this.tries = 0;
      this.link({ name: "live" });
      for await (const event of events(response)) {
        clearTimeout(silence);
        silence = setTimeout(stop, SILENT);
        if (event !== null) this.#heard(event);
      }
      return null;
    } catch (error) {
      return error;
    } finally {
      clearTimeout(silence);
      clearInterval(regular);
      this.abort.abort();
    }
  }

  #heard({ id, event, data }) {
    if (event === "reset") {
      this.last = null;
      this.state.clear();
      this.look(0);
    } else if (event === "ticket") {
      this.last = id;
      this.state.apply(JSON.parse(data), numberOf(id));
      this.look();
    }
    this.changed();
  }
}
