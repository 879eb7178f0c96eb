//! What errors say: whose a thing is, and the remedy of that very case.

use super::*;

const LEN: usize = 4096;

/// Whose the thing is, whose was wanted, and the remedy of that case and of no other.
#[test]
fn a_thing_of_another_device_is_named_with_both_devices() {
    let (_node, [first, second]) = hosts();
    let pool = pool(&first, 1 << 20);
    let copier = Copier::builder(&pool, &first).threads(1).build().unwrap();
    let full = || filled(&pool, LEN, 1);
    let (here, there) = (first.stream().unwrap(), second.stream().unwrap());
    let (near, far) = (first.alloc(LEN).unwrap(), second.alloc(LEN).unwrap());
    let sent = copier.upload_pages(vec![(full(), near.slice(..).unwrap())]).unwrap();
    let of_pool: [Error; 3] = [
        there.download(&far, full()).unwrap_err().error,
        full().device_address(&second).unwrap_err(),
        Copier::builder(&pool, &second).build().unwrap_err(),
    ];
    let of_memory =
        [here.download(&far, full()).unwrap_err().error, copier.upload_slice(&[1; LEN], &far).unwrap_err()];
    let of_stream = [here.wait_for(&there).unwrap_err(), sent.order(&there).unwrap_err()];
    for (errors, words, others) in [
        (&of_pool[..], ["pool of host:0", "with host:1", "PoolBuilder::device"], "memory of"),
        (&of_memory[..], ["device memory of host:1", "with host:0", ""], "PoolBuilder"),
        (&of_stream[..], ["stream of host:1", "with host:0", ""], "PoolBuilder"),
    ] {
        for error in errors {
            let text = error.to_string();
            assert!(words.iter().all(|word| text.contains(word)) && !text.contains(others), "{text}");
        }
    }
    sent.wait().unwrap();
}
