// Boxtool runs inside a box and does there what the backend's own API cannot: it says how a command really ended,
// carries bytes that are not text, ends whole process trees, and packs and unpacks tar streams without any program of
// the box. Standard library only.
//
//	boxtool run ID REQUEST       one command; REQUEST is base64 JSON, or "@" and the path of a file that holds it
//	boxtool signal ID NUMBER     a signal to a command's whole tree; 9 also keeps it from starting later
//	boxtool pack REQUEST         a path as a tar stream
//	boxtool unpack REQUEST       a tar file below a directory
//	boxtool drain                its standard input, read to the end and dropped
//	boxtool relay PORT ID OLD    a listener on the box's loopback, carried outside; see relay.go
//
// Everything it says goes to its standard output as frames "k" + base64 + ";", one per line, where k is s (started),
// o (standard output), e (standard error), p (still there) or x (the end, JSON). White space between and within
// frames means nothing, so a transport may break lines wherever it likes.
package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

const (
	frameBytes    = 24 * 1024
	heartbeatTime = 10 * time.Second
)

// ending is the one terminal frame.
type ending struct {
	Outcome string `json:"outcome"` // exited, signaled, timed_out, out_of_memory, refused, error
	Code    int    `json:"code"`
	Signal  int    `json:"signal"`
	Millis  int64  `json:"ms"`
	Error   string `json:"error,omitempty"`
	Kind    string `json:"kind,omitempty"` // of an error: missing, not_a_directory, unreadable, unwritable
}

// box is what every command of the box has in common; it lies beside this program.
type box struct {
	Env     map[string]string `json:"env"`
	Workdir string            `json:"workdir"`
	User    string            `json:"user"`
}

var output sync.Mutex

func say(kind byte, data []byte) {
	line := make([]byte, 0, base64.StdEncoding.EncodedLen(len(data))+3)
	line = append(line, kind)
	line = base64.StdEncoding.AppendEncode(line, data)
	line = append(line, ';', '\n')
	output.Lock()
	defer output.Unlock()
	if _, err := os.Stdout.Write(line); err != nil && kind != 'p' {
		brokenOutput()
	}
}

// brokenOutput is what happens when nobody listens any more; a command replaces it to take its tree with it.
var brokenOutput = func() { os.Exit(1) }

func end(e ending) {
	data, _ := json.Marshal(e)
	say('x', data)
	code := e.Code
	switch e.Outcome {
	case "exited":
	case "signaled", "out_of_memory":
		code = 128 + e.Signal
	default:
		code = 125
	}
	os.Exit(code)
}

func fail(kind string, err error) {
	end(ending{Outcome: "error", Kind: kind, Error: err.Error()})
}

func decode(request string, into any) {
	var data []byte
	var err error
	if path, found := strings.CutPrefix(request, "@"); found {
		data, err = os.ReadFile(path)
		os.Remove(path)
	} else {
		data, err = base64.StdEncoding.DecodeString(request)
	}
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		fail("request", err)
	}
}

func directory() string {
	path, err := os.Executable()
	if err != nil {
		fail("request", err)
	}
	return path[:strings.LastIndex(path, "/")]
}

func defaults() box {
	var b box
	data, err := os.ReadFile(directory() + "/box.json")
	if err == nil {
		err = json.Unmarshal(data, &b)
	}
	if err != nil {
		fail("request", err)
	}
	return b
}

func heartbeat() {
	for range time.Tick(heartbeatTime) {
		say('p', nil)
	}
}

func main() {
	args := os.Args[1:]
	switch {
	case len(args) == 3 && args[0] == "run":
		run(args[1], args[2])
	case len(args) == 3 && args[0] == "signal":
		sendSignal(args[1], args[2])
	case len(args) == 2 && args[0] == "pack":
		pack(args[1])
	case len(args) == 2 && args[0] == "unpack":
		unpack(args[1])
	case len(args) == 1 && args[0] == "drain":
		io.Copy(io.Discard, os.Stdin)
	case len(args) == 4 && args[0] == "relay":
		runRelay(args[1], args[2], args[3])
	default:
		fmt.Fprintln(os.Stderr, "usage: boxtool run ID REQUEST | signal ID NUMBER | pack REQUEST | unpack REQUEST | drain | relay PORT ID OLD")
		os.Exit(2)
	}
}
