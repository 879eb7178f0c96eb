//! Checkpoints of nearly as many files as a process may have open, and of more.

use pinpool::ErrorClass;
use pinpool::copier::FileSource;
use pinpool_safetensors::Checkpoint;

use super::support::own_process;
use super::support::process::limit;
use super::{Folder, Made, Rig, arrived, file, made};

/// So many files, of one tensor each.
fn shards(folder: &Folder, count: u64) -> Vec<Made> {
    let tensors: Vec<Made> = (0..count).map(|i| made(&format!("t{i:04}"), "U8", &[333], i)).collect();
    for tensor in &tensors {
        folder.put(&format!("{}.safetensors", tensor.name), file(std::slice::from_ref(tensor)));
    }
    tensors
}

/// By the time that a file is read, its name may mean another, or nothing.
#[test]
fn of_many_files_only_those_that_were_opened_are_read() {
    let rig = Rig::plain();
    let copier = rig.copier();
    let folder = Folder::new();
    let tensors = shards(&folder, 60);
    let last = folder.path().join("t0059.safetensors");
    let is_read = |checkpoint: &Checkpoint| {
        arrived(&copier, &checkpoint.loader(&copier).load().unwrap(), &tensors);
        rig.all_is_back();
    };
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let other = folder.put("other", file(&[made("t0059", "U8", &[333], 7)]));
    std::fs::rename(&other, &last).unwrap();
    is_read(&checkpoint);
    std::fs::remove_file(&last).unwrap();
    is_read(&checkpoint);
}

#[test]
fn a_system_that_opens_no_more_files_is_no_wrong_argument() {
    own_process!();
    let (rig, folder) = (Rig::plain(), Folder::new());
    let tensors = shards(&folder, 100);
    let one = folder.path().join("t0000.safetensors");
    limit(libc::RLIMIT_NOFILE, 60);
    let all = Checkpoint::open(folder.path()).map(drop);
    limit(libc::RLIMIT_NOFILE, 0);
    for refused in [all, Checkpoint::open(&one).map(drop), FileSource::open(&one).map(drop)] {
        let error = refused.unwrap_err();
        assert!(error.to_string().contains("ulimit -n"), "{error}");
        assert_eq!(error.class(), ErrorClass::Transient, "{error}");
    }
    // A load has hardly more files open than there are.
    limit(libc::RLIMIT_NOFILE, 130);
    let (copier, checkpoint) = (rig.copier(), Checkpoint::open(folder.path()).unwrap());
    arrived(&copier, &checkpoint.loader(&copier).load().unwrap(), &tensors);
}
