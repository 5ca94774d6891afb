package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	prSetChildSubreaper = 36
	killPatience        = 10 * time.Second
	// The kernel prefers to kill what has a higher score when memory runs out: the command, not what watches it.
	commandOomScore = "300"
)

type command struct {
	Argv    []string          `json:"argv"`
	Cwd     string            `json:"cwd"`
	Env     map[string]string `json:"env"`
	Timeout *float64          `json:"timeout_s"`
	User    string            `json:"user"`
	Stdin   string            `json:"stdin"` // path of a file, removed once it is open
	Merge   bool              `json:"merge_stderr"`
}

func run(id, request string) {
	began := time.Now()
	var c command
	decode(request, &c)
	b := defaults()
	// Whoever has this file has the right to run (or, for signal 9, to keep from running) what has this id, once.
	mark, err := os.OpenFile(marker(id), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if errors.Is(err, fs.ErrExist) {
		end(ending{Outcome: "refused"})
	}
	if err == nil {
		mark.Close()
	}
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0); errno != 0 {
		fail("request", errno)
	}
	oomBefore := oomKills()

	env := map[string]string{}
	for _, entry := range os.Environ() {
		name, value, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, "OPENSANDBOX_") && !strings.HasPrefix(name, "EXECD_") {
			env[name] = value
		}
	}
	user := c.User
	if user == "" {
		user = b.User
	}
	credential, home, err := lookUser(user)
	if err != nil {
		fail("user", err)
	}
	if _, given := b.Env["HOME"]; home != "" && !given {
		env["HOME"] = home
	}
	for _, more := range []map[string]string{b.Env, c.Env} {
		for name, value := range more {
			env[name] = value
		}
	}
	if env["PATH"] == "" {
		env["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	}
	cwd := c.Cwd
	if cwd == "" {
		cwd = b.Workdir
	}
	if cwd == "" {
		cwd = "/"
	}
	if info, err := os.Stat(cwd); err != nil || !info.IsDir() {
		say('e', []byte(fmt.Sprintf("cannot change to directory '%s'\n", cwd)))
		end(ending{Outcome: "exited", Code: 126, Millis: time.Since(began).Milliseconds()})
	}
	env["PWD"] = cwd
	env[markName] = id

	stdin, err := openInput(c.Stdin)
	if err != nil {
		fail("request", err)
	}
	stdout, stdoutIn := newStream('o')
	stderrIn := stdoutIn
	streams := []*stream{stdout}
	if !c.Merge {
		var stderr *stream
		stderr, stderrIn = newStream('e')
		streams = append(streams, stderr)
	}

	program, code := find(c.Argv[0], env["PATH"], cwd)
	var pid int
	if code == 0 {
		flat := make([]string, 0, len(env))
		for name, value := range env {
			flat = append(flat, name+"="+value)
		}
		os.WriteFile("/proc/self/oom_score_adj", []byte(commandOomScore), 0)
		pid, err = syscall.ForkExec(program, c.Argv, &syscall.ProcAttr{
			Dir:   cwd,
			Env:   flat,
			Files: []uintptr{stdin.Fd(), stdoutIn.Fd(), stderrIn.Fd()},
			Sys:   &syscall.SysProcAttr{Setsid: true, Credential: credential},
		})
		os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0)
		if err == syscall.EPERM && credential != nil {
			fail("user", fmt.Errorf("commands of this box cannot run as '%s': %w", user, err))
		}
		if err != nil {
			code = 126
		}
	}
	stdin.Close()
	stdoutIn.Close()
	stderrIn.Close()
	if code != 0 {
		say('s', nil)
		say('e', []byte(fmt.Sprintf("cannot run '%s'\n", c.Argv[0])))
		end(ending{Outcome: "exited", Code: code, Millis: time.Since(began).Milliseconds()})
	}
	brokenOutput = func() {
		// Nobody would ever hear how it ended, nor stop it.
		go killTree(os.Getpid(), id)
	}
	say('s', nil)
	go heartbeat()
	for _, s := range streams {
		go s.pump()
	}

	ended := make(chan syscall.WaitStatus, 1)
	go reap(pid, ended)
	var timedOut atomic.Bool
	var expired <-chan time.Time
	if c.Timeout != nil {
		expired = time.After(time.Duration(*c.Timeout*float64(time.Second)) - time.Since(began))
	}
	var status syscall.WaitStatus
	select {
	case status = <-ended:
	case <-expired:
		timedOut.Store(true)
		killTree(os.Getpid(), id)
		select {
		case status = <-ended:
		case <-time.After(killPatience):
		}
	}
	for _, s := range streams {
		s.finish()
	}
	e := ending{Millis: time.Since(began).Milliseconds()}
	switch {
	case timedOut.Load():
		e.Outcome = "timed_out"
	case ranOut(oomBefore) && (status.Signaled() && status.Signal() == syscall.SIGKILL || status.ExitStatus() == 128+9):
		e.Outcome, e.Signal = "out_of_memory", 9
	case status.Signaled():
		e.Outcome, e.Signal = "signaled", int(status.Signal())
	default:
		e.Outcome, e.Code = "exited", status.ExitStatus()
	}
	end(e)
}

// reap takes in every child, adopted orphans included, and tells how the command itself ended.
func reap(pid int, ended chan<- syscall.WaitStatus) {
	for {
		var status syscall.WaitStatus
		found, err := syscall.Wait4(-1, &status, 0, nil)
		if found == pid && (status.Exited() || status.Signaled()) {
			ended <- status
		}
		if err == syscall.ECHILD {
			return
		}
	}
}

func openInput(path string) (*os.File, error) {
	if path == "" {
		return os.Open("/dev/null")
	}
	file, err := os.Open(path)
	os.Remove(path)
	return file, err
}

// find gives the program's path, or the code that shells give where there is none.
func find(name, path, cwd string) (string, int) {
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = nil
		for _, directory := range strings.Split(path, ":") {
			if directory == "" {
				directory = "."
			}
			candidates = append(candidates, directory+"/"+name)
		}
	}
	code := 127
	for _, candidate := range candidates {
		full := candidate
		if !strings.HasPrefix(full, "/") {
			full = cwd + "/" + full
		}
		info, err := os.Stat(full)
		if err != nil {
			continue
		}
		if info.IsDir() || info.Mode()&0o111 == 0 {
			code = 126
			continue
		}
		return full, 0
	}
	return "", code
}

// lookUser reads the box's own user tables: a name or a number, with ":group" after it or not.
func lookUser(name string) (*syscall.Credential, string, error) {
	if name == "" {
		return nil, "", nil
	}
	name, group, _ := strings.Cut(name, ":")
	var uid, gid uint32
	home := "/"
	found := false
	for _, fields := range table("/etc/passwd", 6) {
		if fields[0] == name || fields[2] == name {
			uid, gid, home, found = number(fields[2]), number(fields[3]), fields[5], true
			name = fields[0]
			break
		}
	}
	if !found {
		value, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			return nil, "", fmt.Errorf("there is no user '%s' in the box", name)
		}
		uid, gid = uint32(value), 0
	}
	var groups []uint32
	for _, fields := range table("/etc/group", 4) {
		if group != "" && (fields[0] == group || fields[2] == group) {
			gid, group = number(fields[2]), ""
		}
		for _, member := range strings.Split(fields[3], ",") {
			if member == name {
				groups = append(groups, number(fields[2]))
			}
		}
	}
	if group != "" {
		value, err := strconv.ParseUint(group, 10, 32)
		if err != nil {
			return nil, "", fmt.Errorf("there is no group '%s' in the box", group)
		}
		gid = uint32(value)
	}
	if int(uid) == os.Getuid() && int(gid) == os.Getgid() {
		return nil, home, nil
	}
	return &syscall.Credential{Uid: uid, Gid: gid, Groups: groups}, home, nil
}

func table(path string, atLeast int) [][]string {
	data, _ := os.ReadFile(path)
	var rows [][]string
	for _, line := range strings.Split(string(data), "\n") {
		if fields := strings.Split(line, ":"); len(fields) >= atLeast {
			rows = append(rows, fields)
		}
	}
	return rows
}

func number(text string) uint32 {
	value, _ := strconv.ParseUint(text, 10, 32)
	return uint32(value)
}
