/* Cancel one request: asks first, says what came of it, and helps where an admin key is needed. */

import { ApiError, ask, key, setKey } from "./api.js";
import { $, text } from "./dom.js";
import { duration, modelName } from "./words.js";

export class Cancel {
  constructor(state, say) {
    Object.assign(this, { state, say, ticket: null, dialog: $("cancel-dialog") });
    $("cancel-no").addEventListener("click", () => this.dialog.close());
    $("cancel-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#go();
    });
  }

  open(ticket) {
    this.ticket = ticket;
    const since =
      ticket.granted === null
        ? `It has waited for ${duration(this.state.now() - ticket.arrived)}.`
        : `It has held the GPU for ${duration(this.state.now() - ticket.granted)}; its answer breaks off.`;
    text($("cancel-what"), `A request for ${modelName(ticket.model)}, id ${ticket.request}. ${since}`);
    $("cancel-help").hidden = true;
    $("cancel-key").value = "";
    $("cancel-yes").disabled = false;
    this.dialog.showModal();
    $("cancel-no").focus();
  }

  async #go() {
    const given = $("cancel-key").value.trim();
    $("cancel-yes").disabled = true;
    try {
      await ask(`lease/${encodeURIComponent(this.ticket.request)}`, { method: "DELETE", key: given || key() });
      if (given) setKey(given);
      this.#done("The request is cancelled.");
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) this.#done("That request was over already.");
      else this.#refused(error, given);
    } finally {
      $("cancel-yes").disabled = false;
    }
  }

  #done(said) {
    this.dialog.close();
    this.say(said);
  }

  #refused(error, given) {
    const keyed = error instanceof ApiError && (error.status === 401 || error.status === 403);
    const why = !keyed
      ? `That did not work: ${error.message}`
      : given
        ? "The server does not take that key for this. It needs one of admin_keys in its configuration."
        : "On this server only an administrator cancels other people's requests: its configuration has admin_keys. Enter one.";
    text($("cancel-why"), why);
    $("cancel-help").hidden = false;
    $("cancel-key").hidden = !keyed;
    document.querySelector("label[for=cancel-key]").hidden = !keyed;
    (keyed ? $("cancel-key") : $("cancel-yes")).focus();
  }
}
