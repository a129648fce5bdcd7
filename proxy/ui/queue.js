/* The queue: who waits, in which place, for how long. */

import { $, h, keyed, text } from "./dom.js";
import { MODES, duration, many, modelName, ordinal } from "./words.js";

const SHOWN = 10;

export class Queue {
  constructor(state, own, cancel) {
    Object.assign(this, { state, own, cancel, all: false, lease: "" });
    $("queue-more").addEventListener("click", () => {
      this.all = !this.all;
      this.draw(this.lease);
    });
  }

  draw(lease) {
    this.lease = lease;
    const now = this.state.now();
    const waiting = this.state.waiting(lease);
    const places = waiting.map((ticket, index) => ({ ticket, place: index + 1 }));
    // One's own requests are shown wherever they stand.
    const shown = places.filter(({ ticket, place }) => this.all || place <= SHOWN || this.own.has(ticket.request));
    $("waiting").hidden = waiting.length === 0;
    $("queue-empty").hidden = waiting.length > 0;
    text($("queue-count"), waiting.length > 0 ? many(waiting.length, "request") : "");
    $("queue-more").hidden = places.length <= SHOWN;
    text($("queue-more"), this.all ? `Show the first ${SHOWN}` : `Show ${places.length - shown.length} more`);
    keyed(
      $("waiters"),
      shown,
      ({ ticket }) => ticket.key,
      ({ ticket }) => this.#row(ticket),
      (row, { ticket, place }) => {
        text(row.cells[0], String(place));
        text(row.cells[3], duration(now - ticket.arrived));
        row.cells[4].firstChild.setAttribute(
          "aria-label",
          `Cancel the request for ${modelName(ticket.model)}, ${ordinal(place)} in the queue`,
        );
      },
    );
  }

  #row(ticket) {
    const button = h("button", { type: "button", class: "quiet" }, "Cancel");
    button.addEventListener("click", () => this.cancel(ticket));
    const you = this.own.has(ticket.request) ? h("span", { class: "you" }, "you") : null;
    return h(
      "tr",
      { title: `request ${ticket.request}` },
      h("td", { class: "num place" }),
      h("th", { scope: "row" }, h("b", {}, modelName(ticket.model)), you),
      h("td", {}, MODES[ticket.mode]),
      h("td", { class: "num" }),
      h("td", { class: "act" }, button),
    );
  }
}
