// Execd is a stand-in for the daemon that an OpenSandbox server puts into each box: as much of its HTTP interface as
// the SDK's commands and files need, for tests on machines that cannot have the real one. Like the real one it sends
// output as text, ends a command with an error event whose value is the exit code, and serves /proxy/{port}/, which a
// server with bridged boxes puts before every path.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const port = "44772"

type commandRequest struct {
	Command string            `json:"command"`
	Argv    []string          `json:"argv"`
	Cwd     string            `json:"cwd"`
	Timeout int64             `json:"timeout"`
	UID     *uint32           `json:"uid"`
	GID     *uint32           `json:"gid"`
	Envs    map[string]string `json:"envs"`
}

type event struct {
	Type      string            `json:"type"`
	Text      string            `json:"text,omitempty"`
	Timestamp int64             `json:"timestamp"`
	Took      int64             `json:"execution_time,omitempty"`
	Error     map[string]any    `json:"error,omitempty"`
}

type events struct {
	lock sync.Mutex
	out  http.ResponseWriter
}

// send writes a frame as the real daemon does: bare JSON and an empty line.
func (e *events) send(one event) {
	one.Timestamp = time.Now().UnixMilli()
	data, _ := json.Marshal(one)
	e.lock.Lock()
	defer e.lock.Unlock()
	e.out.Write(append(data, '\n', '\n'))
	e.out.(http.Flusher).Flush()
}

func problem(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(map[string]string{"code": code, "message": message})
}

var running sync.Map // id -> *exec.Cmd

func runCommand(w http.ResponseWriter, r *http.Request) {
	var request commandRequest
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil || request.Command == "" && len(request.Argv) == 0 {
		problem(w, http.StatusBadRequest, "INVALID_REQUEST_BODY", "neither a command nor an argv")
		return
	}
	argv := request.Argv
	if len(argv) == 0 {
		argv = []string{"/bin/sh", "-c", request.Command}
	}
	// A client that leaves takes its command with it.
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	if request.Timeout > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(request.Timeout)*time.Millisecond)
		defer cancel()
	}
	command := exec.CommandContext(ctx, argv[0], argv[1:]...)
	command.Dir = request.Cwd
	command.Env = os.Environ()
	for name, value := range request.Envs {
		command.Env = append(command.Env, name+"="+value)
	}
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if request.UID != nil {
		credential := &syscall.Credential{Uid: *request.UID}
		if request.GID != nil {
			credential.Gid = *request.GID
		}
		command.SysProcAttr.Credential = credential
	}
	command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }
	stdout, _ := command.StdoutPipe()
	stderr, _ := command.StderrPipe()
	id := fmt.Sprintf("%x", time.Now().UnixNano())
	out := &events{out: w}
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	began := time.Now()
	out.send(event{Type: "init", Text: id})
	if err := command.Start(); err != nil {
		out.send(event{Type: "error", Error: map[string]any{"ename": "CommandExecError", "evalue": "127", "traceback": []string{err.Error()}}})
		return
	}
	running.Store(id, command)
	defer running.Delete(id)
	var readers sync.WaitGroup
	for kind, pipe := range map[string]io.Reader{"stdout": stdout, "stderr": stderr} {
		readers.Add(1)
		go func() {
			defer readers.Done()
			reader := bufio.NewReaderSize(pipe, 256*1024)
			for {
				line, err := reader.ReadString('\n')
				if line != "" {
					out.send(event{Type: kind, Text: strings.TrimSuffix(line, "\n")})
				}
				if err != nil {
					return
				}
			}
		}()
	}
	readers.Wait()
	err := command.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		out.send(event{Type: "error", Error: map[string]any{
			"ename": "CommandExecError", "evalue": strconv.Itoa(exit.ExitCode()), "traceback": []string{exit.Error()},
		}})
		return
	}
	out.send(event{Type: "execution_complete", Took: time.Since(began).Milliseconds()})
}

func interrupt(w http.ResponseWriter, r *http.Request) {
	found, ok := running.Load(r.URL.Query().Get("id"))
	if !ok {
		problem(w, http.StatusNotFound, "CONTEXT_NOT_FOUND", "no such command")
		return
	}
	syscall.Kill(-found.(*exec.Cmd).Process.Pid, syscall.SIGTERM)
}

type fileEntry struct {
	Path  string `json:"path"`
	Owner string `json:"owner"`
	Group string `json:"group"`
	Mode  int    `json:"mode"`
}

func upload(w http.ResponseWriter, r *http.Request) {
	parts, err := r.MultipartReader()
	if err != nil {
		problem(w, http.StatusBadRequest, "INVALID_FILE", err.Error())
		return
	}
	var entry *fileEntry
	for {
		part, err := parts.NextPart()
		if err == io.EOF {
			return
		}
		if err != nil {
			problem(w, http.StatusBadRequest, "INVALID_FILE", err.Error())
			return
		}
		switch part.FormName() {
		case "metadata":
			entry = &fileEntry{}
			err = json.NewDecoder(part).Decode(entry)
		case "file":
			if entry == nil || entry.Path == "" {
				err = errors.New("a file came without its metadata")
			} else {
				err = write(*entry, part)
			}
		}
		if err != nil {
			problem(w, http.StatusInternalServerError, "RUNTIME_ERROR", err.Error())
			return
		}
	}
}

// write takes modes as the interface has them: 644 is what octal 0644 means.
func write(entry fileEntry, content io.Reader) error {
	if err := os.MkdirAll(filepath.Dir(entry.Path), 0o755); err != nil {
		return err
	}
	file, err := os.Create(entry.Path)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	if closing := file.Close(); err == nil {
		err = closing
	}
	if err == nil && entry.Mode != 0 {
		mode, bad := strconv.ParseUint(strconv.Itoa(entry.Mode), 8, 32)
		if bad != nil {
			return bad
		}
		err = os.Chmod(entry.Path, fs.FileMode(mode))
	}
	return err
}

func info(w http.ResponseWriter, r *http.Request) {
	found := map[string]any{}
	for _, path := range r.URL.Query()["path"] {
		stat, err := os.Lstat(path)
		if err != nil {
			problem(w, http.StatusNotFound, "FILE_NOT_FOUND", err.Error())
			return
		}
		mode, _ := strconv.Atoi(strconv.FormatUint(uint64(stat.Mode().Perm()), 8))
		found[path] = map[string]any{
			"path": path, "size": stat.Size(), "modified_at": stat.ModTime(), "created_at": stat.ModTime(),
			"owner": "root", "group": "root", "mode": mode,
		}
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(found)
}

func main() {
	// Its output belongs to the box's own log; what holds the box's terminal must not end with it.
	signal.Ignore(syscall.SIGHUP)
	api := http.NewServeMux()
	api.HandleFunc("GET /ping", func(w http.ResponseWriter, r *http.Request) {})
	api.HandleFunc("POST /command", runCommand)
	api.HandleFunc("DELETE /command", interrupt)
	api.HandleFunc("POST /files/upload", upload)
	api.HandleFunc("GET /files/info", info)
	api.HandleFunc("GET /files/download", func(w http.ResponseWriter, r *http.Request) {
		http.ServeFile(w, r, r.URL.Query().Get("path"))
	})
	api.HandleFunc("/proxy/{port}/", func(w http.ResponseWriter, r *http.Request) {
		wanted := r.PathValue("port")
		if wanted == port {
			http.StripPrefix("/proxy/"+port, api).ServeHTTP(w, r)
			return
		}
		target := &url.URL{Scheme: "http", Host: "127.0.0.1:" + wanted}
		http.StripPrefix("/proxy/"+wanted, httputil.NewSingleHostReverseProxy(target)).ServeHTTP(w, r)
	})
	log.Fatal(http.ListenAndServe(":"+port, api))
}
