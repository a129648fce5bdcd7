/*
 * The last ten minutes on a canvas: a lane for each model, a bar for each request, time from left to right. The bars of a
 * lane are packed into as few rows as fit. The canvas is a picture with a sentence; the table below it has every number.
 */

import { Brush } from "./brush.js";
import { $, h, keyed, text } from "./dom.js";
import { KEPT, segments, waited } from "./state.js";
import { MODES, duration, many, modelName, outcome, seconds } from "./words.js";

const NARROW = 640;
const LABELS = 176;
const AXIS = 26;
const MOST_ROWS = 28;
const TABLE = 100;

export class Timeline {
  constructor(state, own) {
    this.state = state;
    this.own = own;
    this.lease = "";
    this.bars = [];
    this.canvas = $("bars");
    this.pointed = null;
    this.planned = false;
    this.touch = matchMedia("(pointer: coarse)");
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.#soon();
    });
    $("as-table").addEventListener("toggle", () => this.#table());
    new ResizeObserver(() => this.#soon()).observe($("plot"));
    for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) {
      matchMedia(query).addEventListener("change", () => this.#soon());
    }
  }

  draw() {
    const { state, canvas } = this;
    const now = state.now();
    const width = $("plot").clientWidth;
    if (width === 0) return;
    const narrow = width < NARROW;
    const left = narrow ? 0 : LABELS;
    const recent = state.recent(this.lease);
    const lanes = this.#lanes(recent, now, width - left, narrow);
    const height = lanes.reduce((sum, lane) => sum + lane.height, 0);
    this.#label(lanes, narrow);
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round((width - left) * scale);
    canvas.height = Math.round((height + AXIS) * scale);
    canvas.style.width = `${width - left}px`;
    canvas.style.height = `${height + AXIS}px`;
    canvas.style.marginLeft = `${left}px`;
    const brush = new Brush(canvas, scale, width - left, height, now);
    // On a narrow page the labels stand in the lanes, and no line goes through them.
    const spans = narrow ? lanes.map((lane) => [lane.top + 24, lane.top + lane.height]) : [[0, height]];
    brush.grid(lanes, spans, state.since);
    this.bars = [];
    const swaps = recent.filter((ticket) => ticket.swap && ticket.granted > now - KEPT);
    for (const ticket of swaps) brush.swapLine(ticket.granted, spans);
    for (const lane of lanes) {
      for (const { ticket, row } of lane.bars) {
        const y = lane.top + lane.head + row * lane.step;
        const box = brush.bar(ticket, y, lane.bar, this.own.has(ticket.request), ticket === this.pointed?.ticket);
        this.bars.push({ ticket, ...box });
      }
    }
    for (const ticket of swaps) {
      const lane = lanes.find((lane) => lane.model === ticket.model);
      if (lane) brush.swapMark(ticket.granted, lane.top + lane.head);
    }
    this.#say(recent, swaps.length, lanes);
    this.#table();
  }

  /** The lanes with their bars: models with requests first, in the configuration's order, each as high as it needs. */
  #lanes(recent, now, width, narrow) {
    const order = this.state.models.filter((model) => model.lease === this.lease).map((model) => model.id);
    const byModel = new Map(order.map((model) => [model, []]));
    for (const ticket of recent) {
      if (!byModel.has(ticket.model)) byModel.set(ticket.model, []);
      byModel.get(ticket.model).push(ticket);
    }
    let top = 0;
    return [...byModel]
      .filter(([, tickets]) => tickets.length > 0)
      .map(([model, tickets]) => {
        const { bars, rows } = pack(tickets, now, (KEPT / width) * 3);
        const bar = Math.max(3, Math.min(11, Math.floor(96 / rows) - 2));
        const step = bar + (bar > 4 ? 3 : 1);
        const head = narrow ? 36 : 12;
        const height = Math.max(narrow ? 56 : 52, head + rows * step + 9);
        const lane = { model, bars, bar, step, head, top, height, mode: tickets.at(-1).mode, count: tickets.length };
        top += height;
        return lane;
      });
  }

  #label(lanes, narrow) {
    $("lanes").dataset.narrow = narrow;
    keyed(
      $("lanes"),
      lanes,
      (lane) => lane.model,
      () => h("div", { class: "lane" }, h("b"), h("span")),
      (element, lane) => {
        element.style.height = `${lane.height}px`;
        text(element.firstChild, modelName(lane.model));
        element.firstChild.title = lane.model;
        text(element.lastChild, `${MODES[lane.mode]} · ${many(lane.count, "request")}`);
      },
    );
  }

  #say(recent, swaps, lanes) {
    const empty = recent.length === 0;
    $("plot-empty").hidden = !empty;
    for (const part of [this.canvas, $("timeline-legend"), $("readout"), $("as-table")]) part.hidden = empty;
    const address = new URL("../../v1", import.meta.url);
    if (empty) {
      text(
        $("plot-empty"),
        `Nothing has happened in the last ten minutes. Try the playground below, or point a client at ${address}`,
      );
      return;
    }
    const sum = `${many(recent.length, "request")} for ${many(lanes.length, "model")}, ${many(swaps, "swap")}`;
    this.canvas.setAttribute(
      "aria-label",
      `Timeline of the last ten minutes: ${sum}. The table below has each of them.`,
    );
    text($("readout"), this.pointed ? describe(this.pointed.ticket, this.state.now()) : this.#summary(sum, recent));
  }

  #summary(sum, recent) {
    const { since } = this.state;
    const parts = [`${sum}.`];
    if (recent.some((ticket) => this.own.has(ticket.request))) parts.push("Yours are framed.");
    if (since > this.state.now() - KEPT + 1)
      parts.push(`Nothing is known from before ${new Date(since * 1000).toLocaleTimeString()}.`);
    return [...parts, `${this.touch.matches ? "Tap" : "Point at"} a bar to read it.`].join(" ");
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const near = this.bars.filter(
      (bar) => y >= bar.y - 2 && y <= bar.y + bar.height + 2 && x >= bar.from - 4 && x <= bar.to + 4,
    );
    this.pointed = near.at(-1) ?? null;
    this.#soon();
  }

  #soon() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  #table() {
    if (!$("as-table").open) return;
    const now = this.state.now();
    const all = this.state.recent(this.lease).reverse();
    keyed(
      $("rows"),
      all.slice(0, TABLE),
      (ticket) => ticket.key,
      () => h("tr", {}, ...["", "", "", "num", "num", "num", "", ""].map((kind) => h("td", { class: kind }))),
      (row, ticket) => cells(ticket, now).forEach((value, index) => text(row.cells[index], value)),
    );
    text($("rows-more"), all.length > TABLE ? `The newest ${TABLE} of ${all.length}.` : "");
  }
}

/** Give each ticket the first row that is free at its arrival. `gap`: seconds between two bars of a row. */
export function pack(tickets, now, gap) {
  const free = [];
  const bars = tickets.map((ticket) => {
    let row = free.findIndex((time) => time <= ticket.arrived);
    if (row < 0) row = free.length < MOST_ROWS ? free.length : free.indexOf(Math.min(...free));
    free[row] = (ticket.ended ?? now) + gap;
    return { ticket, row };
  });
  return { bars, rows: Math.max(1, free.length) };
}

function describe(ticket, now) {
  const parts = [modelName(ticket.model), `waited ${seconds(waited(ticket, now))}`];
  for (const [phase, from, to] of segments(ticket, now)) {
    if (phase === "loading") parts.push(`loaded for ${seconds(to - from)}`);
    if (phase === "starting") parts.push(`started in ${seconds(to - from)}`);
    if (phase === "streaming") parts.push(`answered for ${seconds(to - from)}`);
  }
  if (ticket.ended !== null) parts.push(`${outcome(ticket)}, ${duration(now - ticket.ended)} ago`);
  return parts.join(" · ");
}

function cells(ticket, now) {
  const times = Object.fromEntries(segments(ticket, now).map(([phase, from, to]) => [phase, seconds(to - from)]));
  return [
    new Date(ticket.arrived * 1000).toLocaleTimeString(),
    modelName(ticket.model),
    MODES[ticket.mode],
    seconds(waited(ticket, now)),
    times.loading ?? times.starting ?? "",
    times.streaming ?? "",
    ticket.swap ? "yes" : "",
    outcome(ticket),
  ];
}
