// Browsers start no workers for pages that are opened from disk. There, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  const load = (page, url) =>
    new Promise((loaded, failed) => {
      const script = page.createElement("script");
      Object.assign(script, { src: url, onload: loaded, onerror: failed });
      page.body.append(script);
    });

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => this.receive(structuredClone(data));
      inner.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => load(inner.document, one)), Promise.resolve());
      this.ready = load(inner.document, url);
    }

    receive(data) {
      const message = new MessageEvent("message", { data });
      this.dispatchEvent(message);
      if (this.onmessage) this.onmessage(message);
    }

    postMessage(data) {
      const copy = structuredClone(data);
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: copy })),
      );
    }

    terminate() {
      this.frame.remove();
    }
  };
}
