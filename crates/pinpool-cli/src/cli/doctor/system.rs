//! Reading the files of `/proc` and `/sys`, below a root.
//!
//! The checks learn about the system by reading files only (`/proc/self` has the process's own
//! limits), so a test can replace the machine by a folder. A file that is not shown is `None`, or
//! [`Unseen`] where a check cannot do without it.

use std::fs;
use std::path::{Path, PathBuf};

use super::Unseen;

/// A machine's files.
#[derive(Clone, Debug)]
pub struct System {
    pub root: PathBuf,
}

impl System {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// An absolute path of that machine, as a path of this one.
    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The file's text. Bytes that are no text (a mount point can be named anything) are replaced.
    pub fn read(&self, path: &str) -> Result<String, Unseen> {
        let bytes = fs::read(self.at(path)).map_err(|_| Unseen(path.to_owned()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The same; empty if the file cannot be read.
    pub fn text(&self, path: &str) -> String {
        self.read(path).unwrap_or_default()
    }

    /// The file's text without the white space around it.
    pub fn word(&self, path: &str) -> Option<String> {
        self.read(path).ok().map(|text| text.trim().to_owned())
    }

    /// Whether there is a folder with something in it.
    pub fn lists(&self, path: &str) -> bool {
        fs::read_dir(self.at(path)).is_ok_and(|mut entries| entries.next().is_some())
    }

    pub fn exists(&self, path: &str) -> bool {
        self.at(path).exists()
    }
}
