package main

import (
	"os"
	"syscall"
	"time"
)

// stream carries what the command writes to one of its two outputs.
type stream struct {
	kind byte
	pipe *os.File
	done chan struct{}
}

func newStream(kind byte) (*stream, *os.File) {
	out, in, err := os.Pipe()
	if err != nil {
		fail("request", err)
	}
	return &stream{kind, out, make(chan struct{})}, in
}

func (s *stream) pump() {
	defer close(s.done)
	buffer := make([]byte, frameBytes)
	for {
		n, err := s.pipe.Read(buffer)
		if n > 0 {
			say(s.kind, buffer[:n])
		}
		if err != nil {
			return
		}
	}
}

// finish says what is still in the pipe, and does not wait for a background process that holds it open.
func (s *stream) finish() {
	s.pipe.SetReadDeadline(time.Now())
	<-s.done
	s.pipe.SetReadDeadline(time.Time{})
	raw, err := s.pipe.SyscallConn()
	if err != nil {
		return
	}
	buffer := make([]byte, frameBytes)
	// A process that goes on writing must not keep us here: no more than a pipe can have held.
	left := 1 << 20
	held := true
	raw.Read(func(descriptor uintptr) bool {
		for left > 0 {
			n, err := syscall.Read(int(descriptor), buffer)
			if err == syscall.EINTR {
				continue
			}
			if n <= 0 {
				held = n != 0
				break
			}
			left -= n
			say(s.kind, buffer[:n])
		}
		return true
	})
	if held {
		s.leave()
	}
}

// leave gives the pipe to a process of its own that reads it to its end: whoever writes to it must neither die of that
// nor wait when this program is gone.
func (s *stream) leave() {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer null.Close()
	syscall.ForkExec("/proc/self/exe", []string{"boxtool", "drain"}, &syscall.ProcAttr{
		Dir:   "/",
		Files: []uintptr{s.pipe.Fd(), null.Fd(), null.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
}
