package main

import (
	"bytes"
	"os"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// markName is in the environment of a command's processes: they can be found by it also when the process that takes
// them in was killed.
const markName = "NEMO_GYM_EXEC_ID"

func marker(id string) string {
	return directory() + "/runs/" + id
}

// parents gives each process's parent, zombies left out.
func parents() map[int]int {
	found := map[int]int{}
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		data, err := os.ReadFile("/proc/" + entry.Name() + "/stat")
		if err != nil {
			continue
		}
		// The name in brackets may hold anything, brackets too.
		fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
		if len(fields) < 2 || fields[0] == "Z" || fields[0] == "X" {
			continue
		}
		found[pid], _ = strconv.Atoi(fields[1])
	}
	return found
}

// descendants gives every process below root. Orphans are among them, as root takes them in.
func descendants(root int) []int {
	of := parents()
	var found []int
	for pid := range of {
		for at, steps := pid, 0; at > 1 && steps < 1000; at, steps = of[at], steps+1 {
			if of[at] == root {
				found = append(found, pid)
				break
			}
		}
	}
	return found
}

// marked gives every process that has the id of a command in its environment.
func marked(id string) []int {
	wanted := []byte(markName + "=" + id + "\x00")
	var found []int
	for pid := range parents() {
		data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
		if err == nil && bytes.Contains(append(data, 0), wanted) {
			found = append(found, pid)
		}
	}
	return found
}

// tree gives the processes of the command with this id; root is the one that takes in its orphans, 0 if that is gone.
func tree(root int, id string) []int {
	found := marked(id)
	if root != 0 {
		found = append(found, descendants(root)...)
	}
	return found
}

// killTree ends a whole tree, what forks meanwhile included; it reports whether nothing is left.
func killTree(root int, id string) bool {
	for deadline := time.Now().Add(killPatience); time.Now().Before(deadline); {
		tree := tree(root, id)
		if len(tree) == 0 {
			return true
		}
		// Stopped first: nothing forks before its turn comes, and no shell sees its own child killed and exits by itself.
		for _, signal := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
			for _, pid := range tree {
				syscall.Kill(pid, signal)
			}
		}
		time.Sleep(2 * time.Millisecond)
	}
	return false
}

// runner finds the process that runs the command with this id; 0 when none does.
func runner(id string) int {
	wanted := []byte("\x00run\x00" + id + "\x00")
	for pid := range parents() {
		if pid == os.Getpid() {
			continue
		}
		line, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
		if err == nil && bytes.Contains(line, wanted) && bytes.HasPrefix(line, []byte(os.Args[0]+"\x00")) {
			return pid
		}
	}
	return 0
}

func sendSignal(id, text string) {
	value, err := strconv.Atoi(text)
	if err != nil {
		fail("request", err)
	}
	if syscall.Signal(value) == syscall.SIGKILL {
		if mark, err := os.OpenFile(marker(id), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600); err == nil {
			mark.Close()
			end(ending{Outcome: "refused"})
		}
	}
	pid := runner(id)
	if syscall.Signal(value) == syscall.SIGKILL {
		if !killTree(pid, id) {
			end(ending{Outcome: "error", Kind: "unkillable", Error: "processes are left"})
		}
		end(ending{Outcome: "exited"})
	}
	sent := map[int]bool{}
	// Parents began first: one that sees its child's end may end before its own signal comes.
	found := tree(pid, id)
	sort.Ints(found)
	for _, one := range found {
		if !sent[one] {
			sent[one] = true
			syscall.Kill(one, syscall.Signal(value))
		}
	}
	end(ending{Outcome: "exited"})
}

// oomKills counts the processes of this box that the kernel killed for lack of memory; -1 when it does not say.
func oomKills() int {
	for _, path := range []string{"/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"} {
		data, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		for _, line := range strings.Split(string(data), "\n") {
			if name, value, _ := strings.Cut(line, " "); name == "oom_kill" {
				count, err := strconv.Atoi(strings.TrimSpace(value))
				if err == nil {
					return count
				}
			}
		}
	}
	return -1
}

func ranOut(before int) bool {
	return before >= 0 && oomKills() > before
}
