//! The folder of one model's blocks in one format, which several processes may share.
//!
//! Guarantees: one process at a time changes the folder: it has the lock beside it, in which a number rises with every
//! change, so that the others know that there was one; a file appears under its name only when it is whole; what a
//! write that failed had begun is removed at once, and what a process left that died is removed by the next that changes
//! something, since nobody who lives writes while another has the lock.
//! Reading needs no lock: a file may be gone when it is opened.

use crate::kv::ContentId;
use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Of a block's file.
pub(super) const EXTENSION: &str = "kv";
const PART_EXTENSION: &str = "part";
/// How long another process may have the lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);

/// Where the files are.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    file_bytes: u64,
    /// Puts bytes into a new file; tests let it fail.
    pub write_file: fn(&Path, &[u8]) -> std::io::Result<()>,
}

/// The right to change the folder, until it is dropped.
#[derive(Debug)]
pub(super) struct Held<'a> {
    folder: &'a Folder,
    lock: File,
}

/// Tells whether the folder has changed: the number in the lock, and when a file came or went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stamp {
    version: u64,
    modified: Option<SystemTime>,
}

/// What is there.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Known contents whose files are there still.
    pub known: HashSet<ContentId>,
    /// Other files of the right size, the one written longest ago first.
    pub new: Vec<ContentId>,
    /// Other files of a wrong size.
    pub damaged: Vec<ContentId>,
    /// Files that somebody did not live to finish.
    parts: Vec<PathBuf>,
    /// There is no folder.
    pub is_missing: bool,
}

impl Folder {
    pub fn new(path: PathBuf, file_bytes: u64) -> Self {
        Folder { path, file_bytes, write_file: |path, bytes| std::fs::write(path, bytes) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn path_of(&self, id: &ContentId) -> PathBuf {
        self.path.join(hex(&id.0)).with_extension(EXTENSION)
    }

    /// Waits for the lock, for a while at most.
    pub fn lock(&self) -> std::io::Result<Held<'_>> {
        let path = self.path.with_extension("lock");
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        let lock = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)?;
        let started = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Held { folder: self, lock }),
                Err(TryLockError::WouldBlock) if started.elapsed() < LOCK_PATIENCE => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(TryLockError::WouldBlock) => {
                    let message = "another process has been changing the folder for too long";
                    return Err(std::io::Error::new(ErrorKind::TimedOut, message));
                }
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    /// As it is now, whoever has the lock.
    pub fn stamp(&self) -> Stamp {
        let lock = File::open(self.path.with_extension("lock")).ok();
        self.stamp_of(lock.map_or(0, |mut lock| version(&mut lock)))
    }

    fn stamp_of(&self, version: u64) -> Stamp {
        let modified = std::fs::metadata(&self.path).and_then(|meta| meta.modified()).ok();
        Stamp { version, modified }
    }

    /// The bytes of a content's file, which counts as used now; nothing where there is no file.
    pub fn read(&self, id: &ContentId) -> std::io::Result<Option<Vec<u8>>> {
        let mut file = match File::open(self.path_of(id)) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        // Where it cannot be said, the file counts as old at the next start: no harm beyond that.
        let _ = file.set_modified(SystemTime::now());
        Ok(Some(bytes))
    }
}

impl Held<'_> {
    pub fn stamp(&mut self) -> Stamp {
        let version = version(&mut self.lock);
        self.folder.stamp_of(version)
    }

    /// Something was changed: the others are to know.
    pub fn changed(&mut self) -> std::io::Result<Stamp> {
        let version = version(&mut self.lock).wrapping_add(1);
        self.lock.seek(SeekFrom::Start(0))?;
        self.lock.write_all(&version.to_le_bytes())?;
        Ok(self.folder.stamp_of(version))
    }

    /// Looks at the names of all files, and at what is not known yet more closely.
    pub fn list(&self, is_known: impl Fn(&ContentId) -> bool) -> std::io::Result<Listing> {
        let mut listing = Listing::default();
        let entries = match std::fs::read_dir(&self.folder.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Listing { is_missing: true, ..Listing::default() });
            }
            Err(error) => return Err(error),
        };
        let mut new = Vec::new();
        for entry in entries {
            let entry = entry?;
            let path = entry.path();
            match id_of(&path) {
                Some(id) if is_known(&id) => drop(listing.known.insert(id)),
                Some(id) => {
                    let Ok(meta) = entry.metadata() else { continue };
                    // Somebody's folder is left alone, whatever it is called.
                    if meta.is_dir() {
                        continue;
                    }
                    let modified = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
                    match meta.len() == self.folder.file_bytes {
                        true => new.push((modified.unwrap_or_default(), id)),
                        false => listing.damaged.push(id),
                    }
                }
                None if path.extension().is_some_and(|x| x == PART_EXTENSION) => listing.parts.push(path),
                None => {}
            }
        }
        new.sort_unstable();
        listing.new = new.into_iter().map(|(_, id)| id).collect();
        Ok(listing)
    }

    /// Removes what is of no use to anybody.
    pub fn clean(&self, listing: &Listing) -> std::io::Result<()> {
        listing.damaged.iter().try_for_each(|id| self.remove(id))?;
        listing.parts.iter().try_for_each(|part| remove(part))
    }

    /// Whole under its name, or not there.
    pub fn write(&self, id: &ContentId, bytes: &[u8]) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.folder.path)?;
        let path = self.folder.path_of(id);
        let part = path.with_extension(format!("{}.{PART_EXTENSION}", std::process::id()));
        let written = (self.folder.write_file)(&part, bytes).and_then(|()| std::fs::rename(&part, &path));
        if written.is_err() {
            // What is left of it takes room that may be what is missing; the fault that is told is the first.
            let _ = remove(&part);
        }
        written
    }

    pub fn remove(&self, id: &ContentId) -> std::io::Result<()> {
        remove(&self.folder.path_of(id))
    }
}

fn version(lock: &mut File) -> u64 {
    let mut bytes = [0; 8];
    let read = lock.seek(SeekFrom::Start(0)).and_then(|_| lock.read_exact(&mut bytes));
    read.map_or(0, |()| u64::from_le_bytes(bytes))
}

/// Removes a file; one that is gone already is no fault.
fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// The content that a file's name says it holds.
fn id_of(path: &Path) -> Option<ContentId> {
    if path.extension()? != EXTENSION {
        return None;
    }
    let name = path.file_stem()?.to_str()?;
    let mut id = [0; 32];
    if name.len() != 64 || !name.is_ascii() {
        return None;
    }
    for (i, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&name[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(ContentId(id))
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_of_a_process_that_writes_is_left_alone_and_that_of_a_dead_one_is_not() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = || Folder::new(dir.path().join("16"), 4);
        let (mine, other) = (folder(), folder());
        let held = mine.lock().expect("nobody has it");
        let part = mine.path_of(&ContentId([1; 32])).with_extension("1.part");
        std::fs::create_dir_all(mine.path()).expect("a folder");
        std::fs::write(&part, [1, 2]).expect("written");
        std::thread::scope(|scope| {
            let cleaner = scope.spawn(|| {
                let held = other.lock().expect("it is let go in time");
                held.clean(&held.list(|_| false).expect("listed")).expect("cleaned");
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(part.exists(), "whoever writes it has the lock");
            drop(held);
            cleaner.join().expect("no panic");
        });
        assert!(!part.exists(), "nobody writes it");
    }

    #[test]
    fn a_change_shows_in_the_stamp_of_all() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = Folder::new(dir.path().join("16"), 4);
        let id = ContentId([1; 32]);
        let mut held = folder.lock().expect("nobody has it");
        let before = held.changed().expect("written");
        assert_eq!(folder.stamp(), before);
        held.write(&id, &[1; 4]).expect("written");
        let after = held.changed().expect("written");
        assert!(after != before && folder.stamp() == after);
        assert_eq!(folder.read(&id).expect("read"), Some(vec![1; 4]));
        std::fs::remove_dir_all(folder.path()).expect("removed");
        assert!(folder.stamp() != after && held.list(|_| true).expect("listed").is_missing);
        assert_eq!(folder.read(&id).expect("no fault"), None);
    }
}
