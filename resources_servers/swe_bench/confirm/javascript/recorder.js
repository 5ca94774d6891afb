// What a rendering carries into the box: records values by functions that were taken before the product was loaded.
// Pasted in front of a CommonJS test file, or imported by a module before anything else.
// No method of a recorded value is called; a getter's answer is a value like any other, read once.
function _ng_make(fs, path) {
  "use strict";
  const MAX_TEXT = 200000;
  const MAX_ITEMS = 20000;
  const MAX_DEPTH = 12;
  const apply = Reflect.apply;
  const ownKeys = Reflect.ownKeys;
  const protoOf = Reflect.getPrototypeOf;
  const own = Reflect.getOwnPropertyDescriptor;
  const isArray = Array.isArray;
  const isInteger = Number.isInteger;
  const stringify = JSON.stringify;
  const quoteRegExp = /[\\^$.*+?()[\]{}|\/-]/;
  const test = RegExp.prototype.test;
  const text = String;
  const codeAt = String.prototype.charCodeAt;
  const slice = String.prototype.slice;
  const hasOwn = Object.prototype.hasOwnProperty;
  const append = fs.appendFileSync;
  const getter = (owner, name) => own(owner, name).get;
  const timeOf = Date.prototype.getTime;
  const sourceOf = getter(RegExp.prototype, "source");
  const flagsOf = getter(RegExp.prototype, "flags");
  const eachOfMap = Map.prototype.forEach;
  const eachOfSet = Set.prototype.forEach;
  const typedPrototype = protoOf(Uint8Array.prototype);
  const typedName = getter(typedPrototype, Symbol.toStringTag);
  const typedLength = getter(typedPrototype, "length");
  const numberOf = Number.prototype.valueOf;
  const stringOf = String.prototype.valueOf;
  const booleanOf = Boolean.prototype.valueOf;
  const bigText = typeof BigInt === "function" ? BigInt.prototype.toString : null;
  const symbolText = Symbol.prototype.toString;
  const setNumber = DataView.prototype.setFloat64;
  const getWord = DataView.prototype.getUint32;
  const view = new DataView(new ArrayBuffer(8));
  const encoded = new WeakSet();
  const isEncoded = WeakSet.prototype.has;
  const addEncoded = WeakSet.prototype.add;
  const NativePromise = Promise;
  const then = Promise.prototype.then;
  const resolve = Promise.resolve;
  const reject = Promise.reject;
  const DIGITS = "0123456789abcdef";
  const ERRORS = { Error: 1, TypeError: 1, RangeError: 1, SyntaxError: 1, ReferenceError: 1, EvalError: 1, URIError: 1 };

  const hex = (number, digits) => {
    let out = "";
    for (let place = digits - 1; place >= 0; place--) out += DIGITS[(number >>> (place * 4)) & 15];
    return out;
  };

  const quote = (string) => {
    const raw = stringify(string);
    let out = "";
    let from = 0;
    for (let place = 0; place < raw.length; place++) {
      const code = apply(codeAt, raw, [place]);
      if (code > 126) {
        out += apply(slice, raw, [from, place]) + "\\u" + hex(code, 4);
        from = place + 1;
      }
    }
    return out + apply(slice, raw, [from]);
  };

  const float = (number) => {
    if (number !== number) return "nan";
    if (number === Infinity) return "inf";
    if (number === -Infinity) return "-inf";
    apply(setNumber, view, [0, number]);
    const high = apply(getWord, view, [0]);
    const exponent = (high >>> 20) & 0x7ff;
    const digits = hex(high & 0xfffff, 5) + hex(apply(getWord, view, [4]), 8);
    const sign = high >>> 31 ? "-" : "";
    return exponent === 0 ? sign + "0x0." + digits + "p-1022" : sign + "0x1." + digits + "p" + (exponent - 1023);
  };

  const attempt = (method, value) => {
    try {
      return apply(method, value, []);
    } catch (error) {
      return undefined;
    }
  };

  // The value of a property of a descriptor; a descriptor inherits from what the product may have changed.
  const valueOf = (descriptor, owner) => {
    if (apply(hasOwn, descriptor, ["value"])) return descriptor.value;
    return descriptor.get === undefined ? undefined : apply(descriptor.get, owner, []);
  };

  const namesOf = (value) => {
    let out = "";
    let count = 0;
    for (let one = value; one !== null && one !== undefined && count < 20; one = protoOf(one), count++) {
      const descriptor = own(one, "constructor");
      if (descriptor === undefined || !apply(hasOwn, descriptor, ["value"])) continue;
      const maker = descriptor.value;
      const name = typeof maker === "function" ? own(maker, "name") : undefined;
      if (name !== undefined && typeof name.value === "string" && name.value !== "") {
        out += (out === "" ? "" : ",") + quote(name.value);
      }
    }
    return "[" + out + "]";
  };

  const isError = (value) => {
    let count = 0;
    for (let one = protoOf(value); one !== null && count < 20; one = protoOf(one), count++) {
      const descriptor = own(one, "constructor");
      const maker = descriptor === undefined ? undefined : descriptor.value;
      const name = typeof maker === "function" ? own(maker, "name") : undefined;
      if (name !== undefined && name.value === "Error") return true;
    }
    return false;
  };

  const messageOf = (value) => {
    const seen = value.message;
    return typeof seen === "string" ? apply(slice, seen, [0, MAX_TEXT]) : null;
  };

  const encodeObject = (value, depth, state) => {
    if (apply(isEncoded, encoded, [value])) return value.text;
    for (let one = state.above; one !== null; one = one.above) {
      if (one.value === value) return '["text","circular",""]';
    }
    const outer = state.above;
    state.above = { value, above: outer };
    try {
      return encodeKind(value, depth, state);
    } finally {
      state.above = outer;
    }
  };

  const encodeKind = (value, depth, state) => {
    if (isArray(value)) {
      const length = value.length;
      let out = "";
      for (let place = 0; place < length; place++) {
        if (state.left < 0) return '["cut"]';
        out += (place === 0 ? "" : ",") + encode(value[place], depth + 1, state);
      }
      return '["list",[' + out + "]]";
    }
    const time = attempt(timeOf, value);
    if (time !== undefined) return '["text","Date",' + quote("" + time) + "]";
    const typed = apply(typedName, value, []);
    if (typed !== undefined) {
      const length = apply(typedLength, value, []);
      const bytes = typed === "Uint8Array" || typed === "Uint8ClampedArray";
      if (length > (bytes ? MAX_TEXT : MAX_ITEMS)) return '["cut"]';
      let out = "";
      for (let place = 0; place < length; place++) {
        out += bytes ? hex(value[place], 2) : (place === 0 ? "" : ",") + encode(value[place], depth + 1, state);
      }
      return bytes ? '["bytes","' + out + '"]' : '["list",[' + out + "]]";
    }
    const boxedNumber = attempt(numberOf, value);
    if (boxedNumber !== undefined) return encode(boxedNumber, depth, state);
    const boxedString = attempt(stringOf, value);
    if (boxedString !== undefined) return encode(boxedString, depth, state);
    const boxedBoolean = attempt(booleanOf, value);
    if (boxedBoolean !== undefined) return encode(boxedBoolean, depth, state);
    const proto = protoOf(value);
    if (proto !== null && isError(value)) {
      const message = messageOf(value);
      return '["error",' + namesOf(value) + "," + (message === null ? "null" : quote(message)) + "]";
    }
    let pairs = "";
    let items = "";
    try {
      apply(eachOfMap, value, [
        (item, key) => {
          pairs += (pairs === "" ? "" : ",") + "[" + encode(key, depth + 1, state) + "," + encode(item, depth + 1, state) + "]";
        },
      ]);
      return '["dict",[' + pairs + "]]";
    } catch (error) {}
    try {
      apply(eachOfSet, value, [
        (item) => {
          items += (items === "" ? "" : ",") + encode(item, depth + 1, state);
        },
      ]);
      return '["set",[' + items + "]]";
    } catch (error) {}
    const source = attempt(sourceOf, value);
    if (source !== undefined) return '["text","RegExp",' + quote("/" + source + "/" + attempt(flagsOf, value)) + "]";
    const keys = ownKeys(value);
    pairs = "";
    for (let place = 0; place < keys.length; place++) {
      const key = keys[place];
      const descriptor = typeof key === "string" ? own(value, key) : undefined;
      if (descriptor === undefined || descriptor.enumerable !== true) continue;
      if (state.left < 0) return '["cut"]';
      const item = valueOf(descriptor, value);
      // What is there and undefined is as good as not there.
      if (item !== undefined) {
        pairs += (pairs === "" ? "" : ",") + '[["str",' + quote(key) + "]," + encode(item, depth + 1, state) + "]";
      }
    }
    const plain = '["dict",[' + pairs + "]]";
    return proto === null || protoOf(proto) === null ? plain : '["as",' + plain + ",null]";
  };

  const encode = (value, depth, state) => {
    state.left -= 1;
    if (depth > MAX_DEPTH || state.left < 0) return '["cut"]';
    switch (typeof value) {
      case "undefined":
        return '["text","undefined","undefined"]';
      case "boolean":
        return value ? '["bool",true]' : '["bool",false]';
      case "string":
        return value.length > MAX_TEXT ? '["cut"]' : '["str",' + quote(value) + "]";
      case "number":
        if (isInteger(value) && value <= 9007199254740992 && value >= -9007199254740992) return '["int","' + value + '"]';
        return '["float","' + float(value) + '"]';
      case "bigint":
        return '["int","' + apply(bigText, value, []) + '"]';
      case "symbol":
        return '["text","symbol",' + quote(apply(symbolText, value, [])) + "]";
      case "function":
        return '["object",["Function"],null]';
      default:
        if (value === null) return '["none"]';
        try {
          return encodeObject(value, depth, state);
        } catch (error) {
          return '["cut"]';
        }
    }
  };

  const whole = (value) => encode(value, 0, { left: MAX_ITEMS, above: null });

  let waiting = "";
  let open = false;
  const flush = () => {
    if (waiting !== "") apply(append, fs, [path, waiting]);
    waiting = "";
  };
  const write = (line) => {
    waiting += line + "\n";
    if (!open || waiting.length > 1000000) flush();
  };
  const record = (site, values) => write("[" + quote(site) + ",[" + values + "]]");

  const made = (string) => {
    const value = { text: string };
    apply(addEncoded, encoded, [value]);
    return value;
  };

  const escaped = (string) => {
    let out = "";
    for (let place = 0; place < string.length; place++) {
      out += (apply(test, quoteRegExp, [string[place]]) ? "\\" : "") + string[place];
    }
    return out;
  };

  // A pattern as it is read outside the box.
  const pattern = (value) => {
    if (typeof value === "string") return made('["str",' + quote(escaped(value)) + "]");
    const source = value === null || typeof value !== "object" ? undefined : attempt(sourceOf, value);
    if (source === undefined) return made('["none"]');
    const flags = attempt(flagsOf, value);
    let prefix = "";
    for (let place = 0; place < flags.length; place++) {
      if (flags[place] === "i" || flags[place] === "s" || flags[place] === "m") prefix += flags[place];
    }
    let out = prefix === "" ? "" : "(?" + prefix + ")";
    for (let place = 0; place < source.length; place++) {
      const named = source[place] === "(" && source[place + 1] === "?" && source[place + 2] === "<";
      if (named && source[place + 3] !== "=" && source[place + 3] !== "!") {
        out += "(?P<";
        place += 2;
      } else out += source[place];
    }
    return made('["str",' + quote(out) + "]");
  };

  const kindOf = (maker) => {
    const name = typeof maker === "function" ? own(maker, "name") : undefined;
    const known = name !== undefined && apply(hasOwn, ERRORS, [name.value]) && name.value !== "Error";
    return made(known ? '["type",[' + quote(name.value) + "]]" : '["none"]');
  };

  // What a test expects of an error: its class and a pattern of its message.
  const wanted = (expected, count) => {
    let kind = made('["none"]');
    let message = made('["none"]');
    for (let place = 0; place < count; place++) {
      const one = expected[place];
      if (typeof one === "function") kind = kindOf(one);
      else if (typeof one === "string") message = pattern(one);
      else if (one !== null && typeof one === "object") {
        message = attempt(sourceOf, one) !== undefined ? pattern(one) : pattern(one.message);
      }
    }
    return "," + kind.text + "," + message.text;
  };

  const raised = (site, failed, error, expected) => {
    record(site, (failed ? whole(error) : '["none"]') + (expected === undefined ? "" : wanted(expected, expected.length)));
  };

  const api = {
    begin(site) {
      flush();
      open = true;
      record(site, "");
    },
    end() {
      open = false;
      flush();
    },
    put(site, one, two) {
      record(site, arguments.length > 2 ? whole(one) + "," + whole(two) : whole(one));
    },
    alike(site, value) {
      const seen = whole(value);
      record(site, seen + "," + seen);
    },
    truth(site, value) {
      record(site, whole(value) + ',["truth",' + (value ? "true" : "false") + "]");
    },
    thrown(site, call, expected) {
      try {
        call();
      } catch (error) {
        raised(site, true, error, expected);
        return error;
      }
      raised(site, false, undefined, expected);
    },
    checked(site, call, check) {
      try {
        call();
      } catch (error) {
        raised(site, true, error, undefined);
        try {
          check(error);
        } catch (other) {}
        return error;
      }
      raised(site, false, undefined, undefined);
    },
    quiet(site, call, expected) {
      let failed = null;
      try {
        call();
      } catch (error) {
        failed = made('["error",["Error"],null]');
      }
      record(site, whole(failed) + (expected ? ',["none"]' : ""));
    },
    settled(site, promise, expected) {
      const done = (failed) => record(site, whole(failed) + (expected ? ',["none"]' : ""));
      let started;
      try {
        started = typeof promise === "function" ? promise() : promise;
      } catch (error) {
        started = apply(reject, NativePromise, [error]);
      }
      return apply(then, apply(resolve, NativePromise, [started]), [
        (value) => {
          done(null);
          return value;
        },
        () => done(made('["error",["Error"],null]')),
      ]);
    },
    rejected(site, promise, expected, check) {
      let started;
      try {
        started = typeof promise === "function" ? promise() : promise;
      } catch (error) {
        raised(site, true, error, expected);
        return apply(resolve, NativePromise, []);
      }
      return apply(then, apply(resolve, NativePromise, [started]), [
        () => raised(site, false, undefined, expected),
        (error) => {
          raised(site, true, error, expected);
          try {
            if (check) check(error);
          } catch (other) {}
          return error;
        },
      ]);
    },
    later(promise, use) {
      return apply(then, apply(resolve, NativePromise, [promise]), [use]);
    },
    failing(promise, use) {
      return apply(then, apply(resolve, NativePromise, [promise]), [() => use(undefined), use]);
    },
    pattern,
    types(value) {
      if (value === null || (typeof value !== "object" && typeof value !== "function")) return made('["type",["' + typeof value + '"]]');
      return made('["type",' + namesOf(value) + "]");
    },
    klass(value) {
      const name = typeof value === "function" ? own(value, "name") : undefined;
      const known = name !== undefined && typeof name.value === "string" && name.value !== "" && globalThis[name.value] === value;
      return made(known ? '["type",[' + quote(name.value) + "]]" : '["none"]');
    },
    called(value) {
      if (isArray(value)) return "array";
      if (value === null) return "null";
      if (typeof value !== "object") return typeof value;
      if (attempt(timeOf, value) !== undefined) return "date";
      if (attempt(sourceOf, value) !== undefined) return "regexp";
      return isError(value) ? "error" : "object";
    },
    part(value, path) {
      if (value === null || value === undefined) return undefined;
      if (typeof path !== "string" || path in Object(value)) {
        if (!isArray(path)) return value[path];
      }
      const steps = isArray(path) ? path : path.split(/[.[\]]+/);
      let one = value;
      for (let place = 0; place < steps.length && one !== null && one !== undefined; place++) {
        if (steps[place] !== "") one = one[steps[place]];
      }
      return one;
    },
    calls(value) {
      if (value && value.mock) return value.mock.calls;
      if (value && value.calls && value.calls.allArgs) return value.calls.allArgs();
      return value && value.args;
    },
  };
  let number = 0;
  api.title = (name) => name + ++number;
  return api;
}
