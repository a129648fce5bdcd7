/* A small chat. Its requests carry an id of ours, by which the page finds their place in the queue. */

import { ApiError, ask, events, leaseTime } from "./api.js";
import { $, h, text } from "./dom.js";
import { many, seconds } from "./words.js";

export class Chat {
  /** `begin()` gives a new id; `progress(element, id)` writes where that request is; `say` is read out. */
  constructor({ begin, progress, say }) {
    Object.assign(this, { begin, progress, say, turns: [], running: null });
    $("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    $("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("chat").requestSubmit();
    });
    $("chat-stop").addEventListener("click", () => this.running?.abort.abort());
    $("chat-new").addEventListener("click", () => this.#forget());
  }

  /** Once a second: where the running request is, until its answer begins. */
  tick() {
    if (this.running !== null && !this.running.began) this.progress($("chat-status"), this.running.id);
  }

  async #send() {
    const content = $("chat-text").value.trim();
    const model = $("chat-model").value;
    if (this.running !== null) return;
    if (!content || !model) {
      text($("chat-status"), model ? "There is nothing to send yet." : "There is no model to chat with.");
      $(model ? "chat-text" : "chat-model").focus();
      return;
    }
    this.turns.push({ role: "user", content });
    this.#turn("You", content);
    $("chat-text").value = "";
    const answer = this.#turn(model, "");
    this.running = { id: this.begin(), abort: new AbortController(), began: false };
    this.#busy(true);
    this.tick();
    try {
      const told = await this.#stream(model, answer);
      this.turns.push({ role: "assistant", content: answer.textContent });
      text($("chat-status"), told);
      this.say(`${model} has answered: ${answer.textContent}`);
    } catch (error) {
      this.#failed(error, answer, content);
    } finally {
      this.running = null;
      this.#busy(false);
    }
  }

  async #stream(model, answer) {
    const { id, abort } = this.running;
    const asked = performance.now();
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "X-Request-Id": id },
      signal: abort.signal,
      json: { model, messages: this.turns, stream: true },
    });
    let first = null;
    let pieces = 0;
    for await (const event of events(response)) {
      if (event === null || event.data === "[DONE]") continue;
      const told = JSON.parse(event.data);
      if (told.error) throw new ApiError(response.status, told.error.message, told.error.code);
      const delta = told.choices?.[0]?.delta;
      const piece = delta?.content ?? "";
      if (!piece) continue;
      if (first === null) {
        first = performance.now();
        this.running.began = true;
        text($("chat-status"), "Answering.");
      }
      pieces += 1;
      answer.append(piece);
      answer.parentElement.parentElement.scrollTop = 1e9;
    }
    const end = performance.now();
    const wait = leaseTime(response);
    const parts = wait === null ? [] : [`waited ${seconds(wait)}`];
    if (first !== null)
      parts.push(
        `first words after ${seconds((first - asked) / 1000)}`,
        `${many(pieces, "piece")} in ${seconds((end - first) / 1000)}`,
      );
    return first === null
      ? "The answer was empty."
      : `${parts.join(" · ")}.`.replace(/^./, (letter) => letter.toUpperCase());
  }

  #failed(error, answer, content) {
    this.turns.pop();
    const stopped = error.name === "AbortError";
    answer.parentElement.classList.add("broken");
    if (answer.textContent === "") answer.parentElement.remove();
    const broke = error instanceof ApiError ? error.message : `The connection broke: ${error.message}`;
    text($("chat-status"), stopped ? "Stopped." : broke);
    this.say($("chat-status").textContent);
    if (!stopped && $("chat-text").value === "") $("chat-text").value = content;
  }

  #turn(who, content) {
    const words = h("p", {}, content);
    $("turns").append(h("li", {}, h("b", {}, who), words));
    $("turns").hidden = false;
    $("chat-new").hidden = false;
    $("turns").scrollTop = 1e9;
    return words;
  }

  #forget() {
    this.running?.abort.abort();
    this.turns = [];
    $("turns").replaceChildren();
    $("turns").hidden = true;
    $("chat-new").hidden = true;
    text($("chat-status"), "");
    $("chat-text").focus();
  }

  #busy(busy) {
    $("chat-send").disabled = busy;
    $("chat-stop").hidden = !busy;
  }
}
