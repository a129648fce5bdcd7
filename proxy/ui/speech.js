/* Speech that plays while it streams. */

import { ApiError, ask, get, leaseTime } from "./api.js";
import { $, h, text } from "./dom.js";
import { Player } from "./player.js";
import { seconds } from "./words.js";

const RATE = 24_000; // of response_format pcm

export class Speech {
  /** `begin()` gives a new id; `progress(element, id)` writes where that request is; `say` is read out. */
  constructor({ begin, progress, say }) {
    Object.assign(this, { begin, progress, say, running: null, voices: [] });
    $("speech").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#speak();
    });
    $("speech-stop").addEventListener("click", () => this.#stop());
    $("speech-speed").addEventListener("input", () =>
      text($("speech-speed-out"), Number($("speech-speed").value).toFixed(1)),
    );
    $("speech-model").addEventListener("change", () => this.#offer());
    $("speech").addEventListener("focusin", () => this.#voices(), { once: true });
  }

  /** Which models speak. */
  async load() {
    const names = (await get("v1/audio/models")).data.map((model) => model.id);
    $("speech-model").replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    $("speech-speak").disabled = names.length === 0;
    if (names.length === 0) text($("speech-status"), "No model of this server speaks.");
    this.#offer();
    return names;
  }

  tick() {
    if (this.running !== null && this.running.player === null) this.progress($("speech-status"), this.running.id);
  }

  /** Only when somebody is about to use them: an upstream may have to load its model to tell its voices. */
  async #voices() {
    try {
      this.voices = (await get("v1/audio/voices")).data;
      this.#offer();
    } catch {
      // The usual voice is there without a list.
    }
  }

  #offer() {
    const model = $("speech-model").value;
    const fits = this.voices.filter((voice) => voice.model === undefined || voice.model === model);
    const usual = h("option", { value: "" }, "the usual one");
    $("speech-voice").replaceChildren(usual, ...fits.map((voice) => h("option", { value: voice.id }, voice.name)));
  }

  async #speak() {
    const input = $("speech-text").value.trim();
    if (this.running !== null) return;
    if (!input) {
      text($("speech-status"), "There is nothing to say yet.");
      $("speech-text").focus();
      return;
    }
    const run = (this.running = {
      id: this.begin(),
      abort: new AbortController(),
      player: null,
      asked: performance.now(),
    });
    this.#busy(true);
    this.tick();
    try {
      await this.#play(run, input);
    } catch (error) {
      const broke = error instanceof ApiError ? error.message : `The speech broke off: ${error.message}`;
      text($("speech-status"), error.name === "AbortError" ? "Stopped." : broke);
      this.say($("speech-status").textContent);
    } finally {
      await run.player?.close();
      cancelAnimationFrame(run.frame);
      this.running = null;
      this.#busy(false);
    }
  }

  async #play(run, input) {
    const voice = $("speech-voice").value;
    const player = new Player(RATE); // now, while the browser sees that the user wants to hear something
    const response = await ask("v1/audio/speech", {
      method: "POST",
      headers: { "X-Request-Id": run.id },
      signal: run.abort.signal,
      json: {
        model: $("speech-model").value,
        input,
        response_format: "pcm",
        speed: Number($("speech-speed").value),
        ...(voice ? { voice } : {}),
      },
    }).catch(async (error) => {
      await player.close();
      throw error;
    });
    run.player = player;
    run.wait = leaseTime(response);
    $("wave").hidden = false;
    this.#draw(run);
    const reader = response.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      run.first ??= (performance.now() - run.asked) / 1000;
      player.push(value);
    }
    run.whole = (performance.now() - run.asked) / 1000;
    await player.end();
    if (run.abort.signal.aborted) throw new DOMException("stopped", "AbortError");
    this.#tell(run, "Spoken");
  }

  #tell(run, what) {
    const { player, first, wait } = run;
    const parts = [`${what}: ${seconds(player.heard)} of ${seconds(player.scheduled)}`];
    if (wait !== null && wait !== undefined) parts.push(`waited ${seconds(wait)}`);
    if (first !== undefined) parts.push(`first sound after ${seconds(first)}`);
    if (player.gaps > 0) parts.push(player.gaps === 1 ? "one gap" : `${player.gaps} gaps`);
    text($("speech-status"), `${parts.join(" · ")}.`);
    Object.assign($("wave").dataset, {
      pieces: player.pieces,
      scheduled: player.scheduled.toFixed(3),
      heard: player.heard.toFixed(3),
    });
  }

  #draw(run) {
    const canvas = $("wave");
    const scale = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = canvas;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const { peaks, heard, scheduled } = run.player;
    const step = Math.min(4, width / Math.max(1, peaks.length));
    const played = scheduled > 0 ? (heard / scheduled) * peaks.length : 0;
    peaks.forEach((peak, index) => {
      const size = Math.max(1.5, peak * 1.6 * height);
      context.fillStyle = style.getPropertyValue(index < played ? "--streaming" : "--waiting").trim();
      context.fillRect(
        index * step,
        (height - Math.min(size, height)) / 2,
        Math.max(0.75, step - 1.25),
        Math.min(size, height),
      );
    });
    canvas.setAttribute("aria-label", `${seconds(scheduled)} of audio so far`);
    this.#tell(run, "Speaking");
    if (this.running === run) run.frame = requestAnimationFrame(() => this.#draw(run));
  }

  #stop() {
    this.running?.abort.abort();
    this.running?.player?.close();
  }

  #busy(busy) {
    $("speech-speak").disabled = busy;
    $("speech-stop").hidden = !busy;
  }
}
