/* Who holds the GPU: one sentence, and a row for each holder. */

import { $, h, keyed, show, text } from "./dom.js";
import { phase, waited } from "./state.js";
import { PHASES, duration, list, many, modelName } from "./words.js";

const SHOWN = 4;

export class Now {
  constructor(state, own, cancel) {
    Object.assign(this, { state, own, cancel, all: false, lease: "" });
    $("holders-more").addEventListener("click", () => {
      this.all = !this.all;
      this.draw(this.lease);
    });
  }

  draw(lease) {
    this.lease = lease;
    const { state } = this;
    if (!state.known) return;
    const now = state.now();
    const holders = state.holders(lease);
    const waiting = state.waiting(lease);
    show($("headline"), ...headline(holders, waiting, Object.keys(state.leases).length > 1 ? lease : "The GPU"));
    text($("subline"), subline(holders, waiting, now));
    document.title = waiting.length > 0 ? `${waiting.length} waiting · llama-lease` : "llama-lease";
    $("no-holders").hidden = holders.length > 0;
    text($("no-holders"), waiting.length > 0 ? "Nobody at this moment." : "Nobody. The next request has it at once.");
    $("holders-more").hidden = holders.length <= SHOWN;
    text($("holders-more"), this.all ? `Show the first ${SHOWN}` : `Show ${holders.length - SHOWN} more`);
    keyed(
      $("holders"),
      this.all ? holders : holders.slice(0, SHOWN),
      (ticket) => ticket.key,
      (ticket) => this.#row(ticket),
      (row, ticket) => fill(row, ticket, now),
    );
  }

  #row(ticket) {
    const button = h("button", { type: "button", class: "quiet" }, "Cancel");
    button.setAttribute("aria-label", `Cancel the running request for ${modelName(ticket.model)}`);
    button.addEventListener("click", () => this.cancel(ticket));
    const you = this.own.has(ticket.request) ? h("span", { class: "you" }, "you") : null;
    return h(
      "li",
      { title: `request ${ticket.request}` },
      h("i"),
      h("div", { class: "who" }, h("b", {}, modelName(ticket.model)), you, h("span", { class: "soft" })),
      h("span", { class: "time" }),
      button,
    );
  }
}

function fill(row, ticket, now) {
  const doing = phase(ticket);
  row.children[0].className = `key-${doing}`;
  const beside = ticket.mode === "none" ? " beside the others" : "";
  text(
    row.querySelector(".soft"),
    waited(ticket, now) < 1
      ? `${PHASES[doing]}${beside}`
      : `${PHASES[doing]}${beside} · waited ${duration(waited(ticket, now))}`,
  );
  text(row.children[2], `for ${duration(now - ticket.granted)}`);
}

/** Parts of the sentence; models in bold. */
function headline(holders, waiting, gpu) {
  const exclusive = holders.filter((ticket) => ticket.mode !== "none");
  const models = [...new Set(exclusive.map((ticket) => modelName(ticket.model)))];
  if (models.length === 0)
    return waiting.some((ticket) => ticket.mode !== "none") ? [`${gpu} changes hands.`] : [`${gpu} is free.`];
  const strong = models.flatMap((model, index) => [
    index === 0 ? "" : index === models.length - 1 ? " and " : ", ",
    h("strong", {}, model),
  ]);
  const doing = exclusive.map(phase);
  const it = gpu === "The GPU" ? "the GPU" : gpu;
  if (doing.every((what) => what === "loading"))
    return [...strong, models.length > 1 ? " are loading." : " is loading."];
  if (models.length > 1) return [...strong, ` share ${it}.`];
  return [...strong, exclusive.some((ticket) => ticket.mode === "write") ? ` has ${it} to itself.` : ` has ${it}.`];
}

function subline(holders, waiting, now) {
  const doing = (what) => holders.filter((ticket) => phase(ticket) === what).length;
  const parts = [];
  if (doing("streaming"))
    parts.push(`${many(doing("streaming"), "request")} ${doing("streaming") === 1 ? "is" : "are"} being answered`);
  if (doing("starting")) parts.push(`${doing("starting")} ${doing("starting") === 1 ? "starts" : "start"}`);
  if (doing("loading"))
    parts.push(`${many(doing("loading"), "request")} ${doing("loading") === 1 ? "goes" : "go"} on when it has loaded`);
  const first = parts.length > 0 ? `${list(parts)}. ` : "";
  if (waiting.length === 0) return `${first}Nobody waits.`;
  const longest = duration(now - Math.min(...waiting.map((ticket) => ticket.arrived)));
  return waiting.length === 1
    ? `${first}One waits, for ${longest}.`
    : `${first}${many(waiting.length, "request")} wait, the first for ${longest}.`;
}
