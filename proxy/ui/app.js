/* Puts the page together: one state, one feed, and everything that draws. */

import { get, key, setKey } from "./api.js";
import { Cancel } from "./cancel.js";
import { Chat } from "./chat.js";
import { $, h, keyed, text } from "./dom.js";
import { Feed } from "./feed.js";
import { Now } from "./now.js";
import { Queue } from "./queue.js";
import { drawRules } from "./rules.js";
import { Speech } from "./speech.js";
import { State, phase } from "./state.js";
import { Timeline } from "./timeline.js";
import { Waits } from "./waits.js";
import { duration, modelName, ordinal } from "./words.js";

class App {
  constructor() {
    this.state = new State();
    this.own = new Set();
    this.lease = "";
    this.status = { name: "connecting" };
    this.planned = false;
    const cancel = new Cancel(this.state, (said) => this.#say(said));
    const open = (ticket) => cancel.open(ticket);
    this.now = new Now(this.state, this.own, open);
    this.queue = new Queue(this.state, this.own, open);
    this.waits = new Waits(this.state);
    this.timeline = new Timeline(this.state, this.own);
    const tools = {
      begin: () => this.#begin(),
      progress: (element, id) => this.#progress(element, id),
      say: (said) => this.#say(said),
    };
    this.chat = new Chat(tools);
    this.speech = new Speech(tools);
    this.feed = new Feed(
      this.state,
      () => this.#soon(),
      (status) => this.#link(status),
    );
    this.offered = false;
  }

  run() {
    setInterval(() => this.#draw(), 1000);
    this.feed.pause(document.hidden);
    document.addEventListener("visibilitychange", () => this.feed.pause(document.hidden));
    $("banner-action").addEventListener("click", () =>
      this.status.name === "key" ? this.#askKey() : this.feed.retry(),
    );
    $("key").addEventListener("click", () => this.#askKey());
    $("key-no").addEventListener("click", () => $("key-dialog").close());
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      setKey($("key-value").value.trim());
      $("key-dialog").close();
      this.offered = false;
      this.feed.retry();
    });
    this.feed.run();
  }

  // Many events in a row are drawn once.
  #soon() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.#draw();
    });
  }

  #draw() {
    const { state } = this;
    state.prune();
    this.#showLink();
    if (!state.known) return;
    const names = Object.keys(state.leases);
    if (!names.includes(this.lease)) this.#choose(names[0] ?? "");
    this.#leases(names);
    text($("version"), state.version);
    this.now.draw(this.lease);
    this.queue.draw(this.lease);
    this.waits.draw(this.lease);
    this.timeline.draw();
    drawRules(state.leases[this.lease]);
    this.chat.tick();
    this.speech.tick();
  }

  // More than one GPU

  #choose(name) {
    this.lease = this.timeline.lease = name;
  }

  #leases(names) {
    $("leases").hidden = names.length < 2;
    keyed(
      $("leases"),
      names,
      (name) => name,
      (name) => {
        const button = h("button", { type: "button", class: "quiet" });
        button.addEventListener("click", () => {
          this.#choose(name);
          this.#draw();
        });
        return button;
      },
      (button, name) => {
        const count = this.state.waiting(name).length;
        text(button, count > 0 ? `${name} (${count})` : name);
        button.setAttribute("aria-pressed", String(name === this.lease));
      },
    );
  }

  // The connection

  #link(status) {
    const before = this.status.name;
    this.status = status;
    if (status.name === "live" && before === "lost") this.#say("Connected again.");
    if (status.name === "lost" && before === "live") this.#say("The server cannot be heard.");
    if (status.name === "live" && !this.offered) this.#offer();
    if (status.name === "key" && before !== "key" && !$("key-dialog").open) this.#askKey();
    this.#draw();
  }

  #showLink() {
    const { name, at, error } = this.status;
    document.body.dataset.link = name;
    document.body.dataset.known = this.state.known;
    $("link").dataset.state = name;
    text(
      $("link-text"),
      {
        live: this.state.stopping ? "server is stopping" : "live",
        lost: "not connected",
        key: "needs a key",
        hidden: "paused",
      }[name] ?? "connecting",
    );
    $("banner").hidden = name !== "lost" && name !== "key";
    if (name === "lost") {
      const next = Math.max(0, Math.ceil((at - Date.now()) / 1000));
      const seen = this.state.known
        ? ` What you see is ${duration(Date.now() / 1000 + this.state.offset - this.state.now())} old.`
        : "";
      text(
        $("banner-text"),
        `The server cannot be heard${error?.status ? ` (${error.message})` : ""}.${seen} Next try in ${next} s.`,
      );
      text($("banner-action"), "Try now");
    }
    if (name === "key") {
      const ours = key()
        ? "The server does not take this key."
        : "The server wants one of api_keys in its configuration.";
      text($("banner-text"), error.status === 401 ? ours : error.message);
      text($("banner-action"), "Enter a key");
    }
    text($("key"), key() ? "Key is set" : "Key");
    if (!this.state.known)
      text(
        $("headline"),
        { connecting: "Looking …", lost: "Nothing to see yet.", key: "This server wants a key." }[name] ?? "\u00a0",
      );
  }

  #askKey() {
    $("key-value").value = key();
    $("key-dialog").showModal();
    $("key-value").select();
  }

  // The playground

  #begin() {
    const id = uuid();
    this.own.add(id);
    return id;
  }

  /** Where a request of ours is. Read out when the place changes, not with every second. */
  #progress(element, id) {
    const [where, since] = this.#place(id);
    text(element, since === null ? `${where}.` : `${where}, for ${duration(this.state.now() - since)}.`);
    if (element.dataset.where !== where) this.#say(where);
    element.dataset.where = where;
  }

  #place(id) {
    const ticket = this.state.byRequest(id);
    if (ticket === undefined) return ["Sent", null];
    switch (phase(ticket)) {
      case "waiting":
        return [`${ordinal(this.state.waiting(ticket.lease).indexOf(ticket) + 1)} in the queue`, ticket.arrived];
      case "loading":
        return [`${modelName(ticket.model)} is loading`, ticket.granted];
      case "starting":
        return ["It has the GPU", ticket.granted];
      default:
        return ["Answering", null];
    }
  }

  async #offer() {
    this.offered = true;
    const [speaking, listed] = await Promise.all([
      this.speech.load().catch(() => []),
      get("v1/models")
        .then((body) => body.data.map((model) => model.id))
        .catch(() => []),
    ]);
    const beside = this.state.models
      .filter((model) => model.mode === "none" || model.backend !== null)
      .map((model) => model.id);
    const known = this.state.models.map((model) => model.id);
    const chats = [...new Set([...known, ...listed])].filter(
      (model) => !speaking.includes(model) && !beside.includes(model),
    );
    const chosen = $("chat-model").value;
    $("chat-model").replaceChildren(...chats.map((model) => h("option", { value: model }, model)));
    if (chats.includes(chosen)) $("chat-model").value = chosen;
  }

  #say(said) {
    text($("said"), said);
  }
}

/** A random UUID: llama-cpp-python's server refuses requests with any other X-Request-Id. */
function uuid() {
  // crypto.randomUUID is missing where the page came over plain HTTP from another machine.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const digits = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return digits.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

new App().run();
