//! Reading the files of `/proc`, `/sys` and `/dev`, below a root.
//!
//! The checks learn about the system by reading files only; limits, capabilities and control groups of this process are
//! in `/proc/self`. So a test can replace the machine by a folder, for every condition. A file that a machine, a
//! container or a sandbox does not show is `None`, or [`Unseen`] where a check cannot do without it.

use std::fs;
use std::path::{Path, PathBuf};

use super::Unseen;

/// A machine's files.
#[derive(Clone, Debug)]
pub struct System {
    root: PathBuf,
}

impl System {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// An absolute path of that machine, as a path of this one.
    pub fn at(&self, path: &str) -> PathBuf {
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

    /// The number in the file.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.word(path)?.parse().ok()
    }

    pub fn exists(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// The sorted names in a folder; none if there is no such folder.
    pub fn list(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        // By length first, so that node10 comes after node9.
        names.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
        names
    }

    /// The numbers behind `prefix` among the names in a folder, such as those of `node0` and `node1`.
    pub fn numbered(&self, path: &str, prefix: &str) -> Vec<u32> {
        let number = |name: &String| name.strip_prefix(prefix)?.parse().ok();
        self.list(path).iter().filter_map(number).collect()
    }

    /// The last part of a symbolic link's target, by which `/sys` names a driver or a group.
    pub fn link(&self, path: &str) -> Option<String> {
        fs::read_link(self.at(path)).ok()?.file_name()?.to_str().map(str::to_owned)
    }
}
