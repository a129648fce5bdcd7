/* Draws the timeline's shapes. Sizes are CSS pixels; colours are the style sheet's, so that they follow the theme. */

import { KEPT, failed, segments } from "./state.js";

const TICKS = [10, 8, 6, 4, 2, 0];

export class Brush {
  constructor(canvas, scale, width, height, now) {
    this.context = canvas.getContext("2d");
    this.context.scale(scale, scale);
    const style = getComputedStyle(canvas);
    this.color = (name) => style.getPropertyValue(`--${name}`).trim();
    this.font = `12px ${style.fontFamily}`;
    Object.assign(this, { width, height, now });
  }

  x(time) {
    return (1 - (this.now - time) / KEPT) * (this.width - 1);
  }

  /** `spans`: from where to where vertical lines go, as [from, to] pairs. */
  grid(lanes, spans, since) {
    const { context, width, height } = this;
    context.lineWidth = 1;
    context.strokeStyle = this.color("hair");
    for (const lane of lanes.slice(1)) this.#line(0, lane.top + 0.5, width, lane.top + 0.5);
    this.#line(0, height + 0.5, width, height + 0.5);
    context.font = this.font;
    context.textBaseline = "top";
    for (const minutes of TICKS) {
      const x = Math.round(this.x(this.now - minutes * 60)) + 0.5;
      context.strokeStyle = this.color("hair");
      for (const [from, to] of spans) this.#line(x, from, x, to);
      this.#line(x, height, x, height + 5);
      context.fillStyle = this.color("soft");
      context.textAlign = minutes === 10 ? "left" : minutes === 0 ? "right" : "center";
      const words = minutes === 10 ? "10 min" : minutes === 0 ? "now" : String(minutes);
      context.fillText(words, minutes === 0 ? width : minutes === 10 ? 0 : x, height + 10);
    }
    if (since !== null && since > this.now - KEPT + 1) this.#unknown(this.x(since));
  }

  /** Before this nothing is known: the server had not started, or too much has happened since. */
  #unknown(x) {
    const { context, height } = this;
    context.fillStyle = this.color("veil");
    context.fillRect(0, 0, x, height);
    context.strokeStyle = this.color("soft");
    context.setLineDash([2, 3]);
    this.#line(Math.round(x) + 0.5, 0, Math.round(x) + 0.5, height);
    context.setLineDash([]);
  }

  swapLine(time, spans) {
    this.context.strokeStyle = this.color("swap");
    const x = Math.round(this.x(time)) + 0.5;
    for (const [from, to] of spans) this.#line(x, from, x, to);
  }

  swapMark(time, top) {
    const { context } = this;
    const x = this.x(time);
    context.fillStyle = this.color("loading");
    context.beginPath();
    context.moveTo(x - 4.5, top - 9);
    context.lineTo(x + 4.5, top - 9);
    context.lineTo(x, top - 2);
    context.fill();
  }

  /** One request; returns where it is. */
  bar(ticket, y, height, own, pointed) {
    const { context } = this;
    const from = Math.max(-2, this.x(ticket.arrived));
    const to = Math.max(from + 1.5, this.x(ticket.ended ?? this.now));
    for (const [phase, start, end] of segments(ticket, this.now)) {
      const left = Math.max(-2, this.x(start));
      const right = Math.max(left + 1, this.x(end));
      if (right < 0) continue;
      this.#segment(phase, left, y, right - left, height);
    }
    if (failed(ticket)) this.#cross(to, y + height / 2);
    if (own || pointed) {
      context.strokeStyle = this.color("ink");
      context.lineWidth = 1;
      context.strokeRect(from - 1.5, y - 1.5, to - from + 3, height + 3);
    }
    return { from, to, y, height };
  }

  #segment(phase, x, y, width, height) {
    const { context } = this;
    const [fill, edge] = { waiting: ["waiting-fill", "waiting"], starting: ["starting", "streaming"] }[phase] ?? [
      phase,
      null,
    ];
    const thin = edge !== null && (height <= 4 || width <= 2);
    // There is no room for an edge on a thin bar, and its pale fill alone would not be seen.
    context.globalAlpha = thin ? 0.55 : 1;
    context.fillStyle = this.color(thin ? edge : fill);
    context.fillRect(x, y, width, height);
    context.globalAlpha = 1;
    if (edge !== null && !thin) {
      context.strokeStyle = this.color(edge);
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    }
    if (phase === "loading" && width > 3) this.#hatch(x, y, width, height);
  }

  #hatch(x, y, width, height) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    context.strokeStyle = this.color("paper");
    context.lineWidth = 1.5;
    for (let at = x - height; at < x + width; at += 5) this.#line(at, y + height, at + height, y);
    context.restore();
  }

  #cross(x, y) {
    const { context } = this;
    context.strokeStyle = this.color("failed");
    context.lineWidth = 1.75;
    this.#line(x - 3, y - 3, x + 3, y + 3);
    this.#line(x - 3, y + 3, x + 3, y - 3);
  }

  #line(x1, y1, x2, y2) {
    this.context.beginPath();
    this.context.moveTo(x1, y1);
    this.context.lineTo(x2, y2);
    this.context.stroke();
  }
}
