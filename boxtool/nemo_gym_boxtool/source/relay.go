package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// A relay listens on the box's loopback and carries its clients' connections to whoever runs it: what clients send
// goes out as frames of standard output, one message each, and what is for them comes in as files that are put into
// the relay's directory (told in its first frame), numbered, each with any number of messages. So nothing has to reach the box but the
// backend's own interface, and the box has no port beside the door's own.
//
// A message is an operation, the connection's number (32 bits) and its data; in files, the data's length (32 bits)
// comes before the data, and opDone ends the file, which may be seen before it is whole.
const (
	opOpen   = 'c' // a client has connected
	opData   = 'd'
	opFinish = 'f' // no more data from this side
	opReset  = 'r' // the connection is broken, or given up
	opCredit = 'w' // so many more bytes (32 bits) may be sent
	opQuit   = 'q'
	opDone   = 'z'

	headBytes    = 5
	windowBytes  = 1 << 20 // that may be on their way in one direction of a connection; the other side knows it too
	lookTime     = 250 * time.Millisecond
	takePatience = 5 * time.Second
	memory       = "/dev/shm"
	memoryBytes  = 32 << 20
	tmpfsMagic   = 0x01021994
)

func tell(op byte, number uint32, data []byte) {
	message := make([]byte, headBytes, headBytes+len(data))
	message[0] = op
	binary.BigEndian.PutUint32(message[1:], number)
	say('o', append(message, data...))
}

func tellCredit(number uint32, count int) {
	var data [4]byte
	binary.BigEndian.PutUint32(data[:], uint32(count))
	tell(opCredit, number, data[:])
}

// client is one connection from a process of the box.
type client struct {
	number  uint32
	conn    *net.TCPConn
	lock    sync.Mutex
	changed *sync.Cond
	window  int      // that may still be told
	queue   [][]byte // for the client
	finish  bool     // after the queue
	broken  bool
	halves  int // that have ended
}

type relay struct {
	lock    sync.Mutex
	clients map[uint32]*client
}

func runRelay(portText, id, previous string) {
	port, err := strconv.Atoi(portText)
	if err != nil {
		fail("request", err)
	}
	inbox, err := makeInbox(id)
	if err != nil {
		fail("unwritable", err)
	}
	listener, err := listen(port, previous)
	if err != nil {
		os.Remove(inbox)
		fail("port", err)
	}
	r := &relay{clients: map[uint32]*client{}}
	say('s', []byte(inbox))
	go heartbeat()
	go r.accept(listener)
	r.read(inbox)
	listener.Close()
	os.RemoveAll(inbox)
	end(ending{Outcome: "exited"})
}

// makeInbox makes a directory of this relay's own, in memory where the box has a file system there with room: what
// comes in is gone again at once, and a disk may be busy.
func makeInbox(id string) (string, error) {
	var about syscall.Statfs_t
	if err := syscall.Statfs(memory, &about); err == nil && about.Type == tmpfsMagic {
		path := memory + "/nemo-gym-" + id
		if about.Bavail*uint64(about.Bsize) >= memoryBytes && os.Mkdir(path, 0o700) == nil {
			return path, nil
		}
	}
	path := directory() + "/in/" + id
	return path, os.MkdirAll(path, 0o700)
}

// listen takes the port, also from an earlier relay whose other end is gone: the one with that id, or any for "-".
func listen(port int, previous string) (*net.TCPListener, error) {
	ended := false
	for deadline := time.Now().Add(takePatience); ; time.Sleep(10 * time.Millisecond) {
		listener, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
		if err == nil {
			return listener, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			return nil, err
		}
		if ended = endRelays(port, previous) || ended; !ended {
			return nil, err
		}
	}
}

func endRelays(port int, id string) bool {
	wanted := "/boxtool\x00relay\x00" + strconv.Itoa(port) + "\x00"
	if id != "-" {
		wanted += id + "\x00"
	}
	found := false
	for pid := range parents() {
		line, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
		if err == nil && pid != os.Getpid() && bytes.Contains(line, []byte(wanted)) {
			found = syscall.Kill(pid, syscall.SIGKILL) == nil || found
		}
	}
	return found
}

func (r *relay) accept(listener *net.TCPListener) {
	for number := uint32(1); ; number++ {
		conn, err := listener.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // out of descriptors, say
			continue
		}
		c := &client{number: number, conn: conn, window: windowBytes}
		c.changed = sync.NewCond(&c.lock)
		r.lock.Lock()
		r.clients[number] = c
		r.lock.Unlock()
		tell(opOpen, number, nil)
		go r.fromClient(c)
		go r.toClient(c)
	}
}

// ended counts a direction that is done. Of a connection that broke, both are.
func (r *relay) ended(c *client, broke bool) {
	c.lock.Lock()
	tells := broke && !c.broken
	c.broken = c.broken || broke
	c.halves++
	done := c.halves == 2
	c.changed.Broadcast()
	c.lock.Unlock()
	if broke {
		c.conn.Close()
	}
	if tells {
		tell(opReset, c.number, nil)
	}
	if done {
		c.conn.Close()
		r.lock.Lock()
		delete(r.clients, c.number)
		r.lock.Unlock()
	}
}

func (r *relay) fromClient(c *client) {
	buffer := make([]byte, frameBytes-headBytes)
	for {
		c.lock.Lock()
		for c.window == 0 && !c.broken {
			c.changed.Wait()
		}
		room, broken := min(c.window, len(buffer)), c.broken
		c.lock.Unlock()
		if broken {
			r.ended(c, false)
			return
		}
		n, err := c.conn.Read(buffer[:room])
		if n > 0 {
			c.lock.Lock()
			c.window -= n
			c.lock.Unlock()
			tell(opData, c.number, buffer[:n])
		}
		if err == io.EOF {
			tell(opFinish, c.number, nil)
		}
		if err != nil {
			r.ended(c, err != io.EOF)
			return
		}
	}
}

func (r *relay) toClient(c *client) {
	taken := 0
	for {
		c.lock.Lock()
		for len(c.queue) == 0 && !c.finish && !c.broken {
			c.changed.Wait()
		}
		if c.broken || len(c.queue) == 0 {
			broken := c.broken
			c.lock.Unlock()
			if !broken {
				c.conn.CloseWrite()
			}
			r.ended(c, false)
			return
		}
		data := c.queue[0]
		c.queue = c.queue[1:]
		c.lock.Unlock()
		if _, err := c.conn.Write(data); err != nil {
			r.ended(c, true)
			return
		}
		if taken += len(data); taken >= windowBytes/2 {
			tellCredit(c.number, taken)
			taken = 0
		}
	}
}

// read takes in the files of the inbox, in order, until one says to quit.
func (r *relay) read(inbox string) {
	arrived := watch(inbox)
	for next := 1; ; {
		data, err := os.ReadFile(inbox + "/" + strconv.Itoa(next))
		if messages, whole := split(data); err == nil && whole {
			// Whoever puts files here may be about to set this one's mode, and puts the next one when that is done.
			os.Remove(inbox + "/" + strconv.Itoa(next-1))
			next++
			for _, one := range messages {
				if one.op == opQuit {
					return
				}
				r.take(one)
			}
			continue
		}
		select {
		case <-arrived:
		case <-time.After(lookTime):
		}
	}
}

type message struct {
	op     byte
	number uint32
	data   []byte
}

// split gives a file's messages, and whether they are all there.
func split(data []byte) ([]message, bool) {
	var found []message
	for len(data) >= headBytes+4 {
		size := int(binary.BigEndian.Uint32(data[headBytes:]))
		if len(data)-headBytes-4 < size {
			break
		}
		one := message{data[0], binary.BigEndian.Uint32(data[1:]), data[headBytes+4 : headBytes+4+size]}
		if one.op == opDone {
			return found, true
		}
		found = append(found, one)
		data = data[headBytes+4+size:]
	}
	return nil, false
}

func (r *relay) take(one message) {
	r.lock.Lock()
	c := r.clients[one.number]
	r.lock.Unlock()
	if c == nil {
		return
	}
	c.lock.Lock()
	switch one.op {
	case opData:
		c.queue = append(c.queue, one.data)
	case opFinish:
		c.finish = true
	case opCredit:
		if len(one.data) == 4 {
			c.window += int(binary.BigEndian.Uint32(one.data))
		}
	case opReset:
		c.broken = true
		c.conn.SetLinger(0)
		c.conn.Close()
	}
	c.changed.Broadcast()
	c.lock.Unlock()
}

// watch wakes whoever looks for files. Where the kernel does not tell of them, they are looked for now and then.
func watch(inbox string) <-chan struct{} {
	arrived := make(chan struct{}, 1)
	descriptor, err := syscall.InotifyInit1(syscall.IN_CLOEXEC)
	if err != nil {
		return arrived
	}
	if _, err := syscall.InotifyAddWatch(descriptor, inbox, syscall.IN_CLOSE_WRITE|syscall.IN_MOVED_TO); err != nil {
		syscall.Close(descriptor)
		return arrived
	}
	go func() {
		buffer := make([]byte, 64*1024)
		for {
			n, err := syscall.Read(descriptor, buffer)
			if err == syscall.EINTR {
				continue
			}
			if err != nil || n <= 0 {
				return
			}
			select {
			case arrived <- struct{}{}:
			default:
			}
		}
	}()
	return arrived
}
