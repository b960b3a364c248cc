// Browsers start no workers for pages that are opened from disk. There, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  /** @typedef {Window & { importScripts: (...urls: string[]) => Promise<void> }} WorkerScope */

  /**
   * Run a script in a page.
   * @param {Document} page
   * @param {string} url
   * @returns {Promise<void>}
   */
  const load = (page, url) =>
    new Promise((loaded, failed) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = () => loaded();
      script.onerror = () => failed(new Error(`${url} cannot be loaded`));
      page.body.append(script);
    });

  class FramedWorker extends EventTarget {
    /** @type {((message: MessageEvent) => void) | null} */
    onmessage = null;

    /**
     * @param {string} url
     */
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = /** @type {WorkerScope} */ (this.frame.contentWindow);
      this.inner = inner;
      inner.postMessage = /** @param {unknown} data */ data => this.receive(structuredClone(data));
      inner.importScripts = async (...urls) => {
        for (const one of urls) await load(inner.document, one);
      };
      this.ready = load(inner.document, url);
    }

    /**
     * @param {unknown} data
     */
    receive(data) {
      const message = new MessageEvent("message", { data });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    }

    /**
     * @param {unknown} data
     */
    postMessage(data) {
      const copy = structuredClone(data);
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data: copy })));
    }

    terminate() {
      this.frame.remove();
    }
  }

  Object.assign(window, { Worker: FramedWorker });
}
