package main

import (
	"archive/tar"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"time"
)

type packing struct {
	Path    string   `json:"path"`
	Exclude []string `json:"exclude"`
}

type unpacking struct {
	Path string `json:"path"`
	Tar  string `json:"tar"` // path of a file, removed once it is open
}

// frames writes everything as frames of standard output.
type frames struct{ buffer []byte }

func (f *frames) Write(data []byte) (int, error) {
	f.buffer = append(f.buffer, data...)
	for len(f.buffer) >= frameBytes {
		say('o', f.buffer[:frameBytes])
		f.buffer = append(f.buffer[:0], f.buffer[frameBytes:]...)
	}
	return len(data), nil
}

func (f *frames) flush() {
	if len(f.buffer) > 0 {
		say('o', f.buffer)
		f.buffer = nil
	}
}

type inode struct{ device, number uint64 }

type packer struct {
	out     *tar.Writer
	names   map[string]bool // excluded everywhere; whether directories only
	paths   map[string]bool
	written map[inode]string
	device  uint64
}

func pack(request string) {
	var r packing
	decode(request, &r)
	say('s', nil)
	go heartbeat()
	out := &frames{}
	p := &packer{tar.NewWriter(out), map[string]bool{}, map[string]bool{}, map[inode]string{}, 0}
	for _, pattern := range r.Exclude {
		excluded, directories := p.paths, strings.HasSuffix(pattern, "/")
		name, everywhere := strings.CutPrefix(pattern, "**/")
		if everywhere {
			excluded = p.names
		}
		name = strings.Trim(filepath.Clean("/"+name), "/")
		if only, found := excluded[name]; !found || only {
			excluded[name] = directories
		}
	}
	name := filepath.Base(r.Path)
	if name == "/" {
		name = "."
	}
	// A final link is followed.
	real, err := filepath.EvalSymlinks(r.Path)
	if err == nil {
		var info fs.FileInfo
		if info, err = os.Lstat(real); err == nil {
			p.device = uint64(info.Sys().(*syscall.Stat_t).Dev)
			err = p.add(real, name, "", info)
		}
	}
	if err == nil {
		err = p.out.Close()
	}
	if errors.Is(err, fs.ErrNotExist) {
		fail("missing", err)
	}
	for _, host := range []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.EIO} {
		if errors.Is(err, host) {
			fail("host", err) // never blamed on the file that was read
		}
	}
	if err != nil {
		fail("unreadable", err)
	}
	out.flush()
	end(ending{Outcome: "exited"})
}

func (p *packer) excluded(below string, isDirectory bool) bool {
	parts := strings.Split(below, "/")
	for i, part := range parts {
		directory := isDirectory || i < len(parts)-1
		if only, found := p.names[part]; found && (directory || !only) {
			return true
		}
		if only, found := p.paths[strings.Join(parts[:i+1], "/")]; found && (directory || !only) {
			return true
		}
	}
	return false
}

// add writes one entry; name is the member's, below is the path under the packed one.
func (p *packer) add(path, name, below string, info fs.FileInfo) error {
	stat := info.Sys().(*syscall.Stat_t)
	header := &tar.Header{
		Name: name, Mode: int64(stat.Mode & 0o7777), Uid: int(stat.Uid), Gid: int(stat.Gid),
		ModTime: info.ModTime().Truncate(time.Second), Format: tar.FormatGNU,
	}
	switch {
	case info.IsDir():
		header.Typeflag = tar.TypeDir
		header.Name += "/"
		if err := p.out.WriteHeader(header); err != nil {
			return err
		}
		if uint64(stat.Dev) != p.device {
			return nil
		}
		return p.children(path, name, below)
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(path)
		if err != nil {
			return gone(err)
		}
		header.Typeflag, header.Linkname = tar.TypeSymlink, target
		return p.out.WriteHeader(header)
	case info.Mode().IsRegular():
		key := inode{uint64(stat.Dev), stat.Ino}
		if first, found := p.written[key]; found && stat.Nlink > 1 {
			header.Typeflag, header.Linkname = tar.TypeLink, first
			return p.out.WriteHeader(header)
		}
		return p.file(path, header, key)
	}
	return nil
}

func (p *packer) children(path, name, below string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return gone(err)
	}
	sort.Slice(entries, func(i, j int) bool { return entries[i].Name() < entries[j].Name() })
	for _, entry := range entries {
		inside := entry.Name()
		if below != "" {
			inside = below + "/" + inside
		}
		if p.excluded(inside, entry.IsDir()) {
			continue
		}
		info, err := os.Lstat(path + "/" + entry.Name())
		if err == nil {
			err = p.add(path+"/"+entry.Name(), name+"/"+entry.Name(), inside, info)
		}
		if err = gone(err); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) file(path string, header *tar.Header, key inode) error {
	// A pipe put in the file's place in this moment must not block us.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return gone(err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return err
	}
	header.Typeflag, header.Size = tar.TypeReg, info.Size()
	if err := p.out.WriteHeader(header); err != nil {
		return err
	}
	p.written[key] = header.Name
	copied, err := io.CopyN(p.out, file, header.Size)
	if err == io.EOF {
		// It shrank meanwhile.
		zeros := make([]byte, frameBytes)
		for err = nil; err == nil && copied < header.Size; {
			var n int
			n, err = p.out.Write(zeros[:min(int64(len(zeros)), header.Size-copied)])
			copied += int64(n)
		}
	}
	return err
}

// gone forgives that an entry vanished while we came to it.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func unpack(request string) {
	var r unpacking
	decode(request, &r)
	say('s', nil)
	go heartbeat()
	source, err := os.Open(r.Tar)
	os.Remove(r.Tar)
	if err != nil {
		fail("request", err)
	}
	credential, _, err := lookUser(defaults().User)
	if err != nil {
		fail("user", err)
	}
	if err := makeDirectories(r.Path, credential); err != nil {
		fail("not_a_directory", err)
	}
	// Nothing below it is reached but through real directories in it, or links that stay in it.
	root, err := os.OpenRoot(r.Path)
	if err != nil {
		fail("not_a_directory", err)
	}
	u := &unpacker{root: root, owner: credential}
	reader := tar.NewReader(source)
	for {
		header, err := reader.Next()
		if err == io.EOF {
			break
		}
		if err == nil {
			err = u.add(header, reader)
		}
		if err != nil {
			fail("unwritable", err)
		}
	}
	if err := u.finish(); err != nil {
		fail("unwritable", err)
	}
	end(ending{Outcome: "exited"})
}

// makeDirectories creates a directory with what is missing above it, owned by whoever runs commands.
func makeDirectories(path string, owner *syscall.Credential) error {
	var missing []string
	for at := path; ; at = filepath.Dir(at) {
		if _, err := os.Lstat(at); err == nil || at == "/" {
			break
		}
		missing = append(missing, at)
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	for _, made := range missing {
		if owner != nil {
			os.Lchown(made, int(owner.Uid), int(owner.Gid))
		}
	}
	return nil
}

type unpacker struct {
	root        *os.Root
	owner       *syscall.Credential
	directories []*tar.Header
}

func (u *unpacker) add(header *tar.Header, content io.Reader) error {
	name := filepath.Clean(header.Name)
	if header.Typeflag == tar.TypeDir {
		if err := u.root.MkdirAll(name, 0o755); err != nil {
			return err
		}
		u.directories = append(u.directories, header)
		return nil
	}
	if parent := filepath.Dir(name); parent != "." {
		if err := u.root.MkdirAll(parent, 0o755); err != nil {
			return err
		}
	}
	if info, err := u.root.Lstat(name); err == nil && info.IsDir() {
		return &fs.PathError{Op: "replace", Path: name, Err: syscall.EISDIR}
	}
	// Whole or not at all, and in one step: other archives may be unpacked here at the same time.
	temporary := filepath.Join(filepath.Dir(name), ".unpacking-"+rand.Text())
	if err := u.make(header, temporary, content); err != nil {
		u.root.Remove(temporary)
		return err
	}
	if err := u.root.Rename(temporary, name); err != nil {
		u.root.Remove(temporary)
		return err
	}
	if header.Typeflag == tar.TypeLink {
		u.root.Remove(temporary) // a rename between two names of one file does nothing
	}
	return nil
}

// make writes what is no directory under a name that nothing has.
func (u *unpacker) make(header *tar.Header, name string, content io.Reader) error {
	switch header.Typeflag {
	case tar.TypeSymlink:
		if err := u.root.Symlink(header.Linkname, name); err != nil {
			return err
		}
		if u.owner != nil {
			return u.root.Lchown(name, int(u.owner.Uid), int(u.owner.Gid))
		}
		return nil
	case tar.TypeLink:
		return u.root.Link(filepath.Clean(header.Linkname), name)
	}
	file, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	if err == nil && u.owner != nil {
		err = file.Chown(int(u.owner.Uid), int(u.owner.Gid))
	}
	if err == nil {
		err = file.Chmod(permissions(header))
	}
	if closing := file.Close(); err == nil {
		err = closing
	}
	if err == nil {
		err = u.root.Chtimes(name, header.ModTime, header.ModTime)
	}
	return err
}

// finish gives directories their modes and times last: they may be read-only, and filling them changes their times.
func (u *unpacker) finish() error {
	for i := len(u.directories) - 1; i >= 0; i-- {
		header := u.directories[i]
		name := filepath.Clean(header.Name)
		if u.owner != nil {
			if err := u.root.Chown(name, int(u.owner.Uid), int(u.owner.Gid)); err != nil {
				return err
			}
		}
		if err := u.root.Chmod(name, permissions(header)); err != nil {
			return err
		}
		if err := u.root.Chtimes(name, header.ModTime, header.ModTime); err != nil {
			return err
		}
	}
	return nil
}

// permissions leaves out set-user-id and set-group-id.
func permissions(header *tar.Header) fs.FileMode {
	mode := fs.FileMode(header.Mode & 0o777)
	if header.Mode&0o1000 != 0 {
		mode |= fs.ModeSticky
	}
	return mode
}
