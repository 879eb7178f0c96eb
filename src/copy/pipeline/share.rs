//! The counts of a pipeline's segments: which of its threads may have one, which asks the pool for it, and which others
//! hear of the answer.
//!
//! Nothing here is done but under the engine's lock, and the pool is asked without it. A segment that is asked for
//! counts as in use meanwhile, so that a thread that looks then finds less room than there is, and sleeps until a
//! segment comes back. If the pool has none, that segment never will: so whatever the answer was, those threads are
//! told ([`Tell`]), or they would sleep for good.
//!
//! Where nothing has come back since the question, the pool is *dry*: it is asked again from time to time by one thread
//! that sleeps with a timer, so a thread that sleeps without one is woken to take its own. Otherwise something has come
//! back, or somebody's transfer has ended: the thread that asked looks again if it still has a transfer to look for,
//! and the others do in any case. (That is no event by itself: two threads that ask in vain by turns would each give
//! the other a reason to ask again.)

use super::job::Direction;

/// See the module's page. `B`: a segment.
pub(super) struct Share<B> {
    /// Segments in use, or asked for, by direction.
    pub(super) out: [usize; 2],
    /// Of these, those asked for on behalf of downloads that their callers drain.
    pub(super) pulling: usize,
    /// Segments that are not in use.
    pub(super) stash: Vec<B>,
    /// The pool had nothing when it was asked last, and nothing has come back since.
    pub(super) dry: bool,
    /// A watcher, or a feed's thread, sleeps without a timer, since the pool was not dry: it has to be told when it is.
    untimed: bool,
    /// Counts what may let a thread go on that has found nothing to do.
    pub(super) events: u64,
}

/// What a thread looks for.
pub(super) struct Wish {
    pub(super) direction: Direction,
    /// So many may be in use at most, in all and in this direction.
    pub(super) all: usize,
    pub(super) own: usize,
    /// As many count as in use that are none: windows.
    pub(super) beside: usize,
    /// For a download that its caller drains.
    pub(super) pulled: bool,
    /// The thread may stand in the pool's queue.
    pub(super) patient: bool,
}

/// What came of a look.
pub(super) enum Look {
    /// A segment will come back, or the pool is to be asked later.
    NotNow,
    /// There is one in the stash, to be taken and counted.
    Stashed,
    /// Counted: the pool is to be asked, and then [`Share::answered`] to be called.
    Ask(Question),
}

/// The pool is asked for a segment.
pub(super) struct Question {
    direction: Direction,
    pulled: bool,
    /// In its queue.
    pub(super) waits: bool,
    events: u64,
}

/// What the pool said.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Segment,
    Nothing,
    Failed,
}

/// Which threads hear of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Tell {
    None,
    /// The pool is dry. A worker, if it was none that asked, and the watchers and feeds, if any of them sleeps without
    /// a timer.
    Dry {
        worker: bool,
        untimed: bool,
    },
    /// There may be room, or the place in the pool's queue: a worker, and all that wait for a segment.
    All,
}

impl<B> Share<B> {
    pub(super) fn new() -> Self {
        Self { out: [0, 0], pulling: 0, stash: Vec::new(), dry: false, untimed: false, events: 0 }
    }

    /// Looks for a segment.
    pub(super) fn look(&mut self, wish: &Wish) -> Look {
        let used = self.out[0] + self.out[1] + wish.beside;
        let room = used < wish.all && self.out[wish.direction as usize] < wish.own;
        if !room || (self.stash.is_empty() && self.dry && used > 0) {
            return Look::NotNow;
        }
        if !self.stash.is_empty() {
            return Look::Stashed;
        }
        self.out[wish.direction as usize] += 1;
        self.pulling += usize::from(wish.pulled);
        let waits = used == 0 && wish.patient;
        Look::Ask(Question { direction: wish.direction, pulled: wish.pulled, waits, events: self.events })
    }

    /// The pool has answered, to a worker or to another thread.
    pub(super) fn answered(&mut self, question: Question, answer: Answer, is_worker: bool) -> Tell {
        self.pulling -= usize::from(question.pulled);
        if answer == Answer::Segment {
            return Tell::None;
        }
        self.out[question.direction as usize] -= 1;
        let unchanged = answer == Answer::Nothing && self.events == question.events;
        self.dry = unchanged && !question.waits;
        if self.dry {
            let untimed = std::mem::take(&mut self.untimed);
            return Tell::Dry { worker: !is_worker, untimed };
        }
        if question.waits {
            // A thread that has asked meanwhile is to look again: it may stand in the queue now.
            self.events += 1;
        }
        Tell::All
    }

    /// A segment that was in use has come back, is with the pool, or is lost.
    pub(super) fn came_back(&mut self) {
        self.dry = false;
        self.events += 1;
    }

    /// The pool is to be asked again, if it was dry: whether it was.
    pub(super) fn is_dry_no_more(&mut self) -> bool {
        std::mem::take(&mut self.dry)
    }

    /// A watcher or a feed's thread sleeps. Whether with a timer: not where no transfer is `live`.
    pub(super) fn lies_down(&mut self, live: bool) -> bool {
        let timed = self.dry && live;
        self.untimed |= !timed;
        timed
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn wish(direction: Direction, patient: bool) -> Wish {
        Wish { direction, all: 1, own: 1, beside: 0, pulled: false, patient }
    }

    fn ask(share: &mut Share<()>, patient: bool) -> Question {
        match share.look(&wish(Direction::Up, patient)) {
            Look::Ask(question) => question,
            _ => panic!("there is room"),
        }
    }

    /// A thread that has looked while the pool was asked sleeps for a segment that never was.
    #[test]
    fn an_answer_that_brings_nothing_is_told_to_those_that_looked_meanwhile() {
        for answer in [Answer::Nothing, Answer::Failed] {
            for (changes, patient) in [(false, false), (false, true), (true, false), (true, true)] {
                let mut share = Share::new();
                let question = ask(&mut share, patient);
                assert!(matches!(share.look(&wish(Direction::Down, false)), Look::NotNow));
                assert!(!share.lies_down(true), "it sleeps without a timer");
                share.events += u64::from(changes);
                let tell = share.answered(question, answer, true);
                let is_dry = !changes && !patient && answer == Answer::Nothing;
                let dry = Tell::Dry { worker: false, untimed: true };
                assert_eq!(tell, if is_dry { dry } else { Tell::All }, "{changes} {patient}");
                assert_eq!((share.out, share.dry), ([0, 0], is_dry));
                assert_eq!(share.lies_down(true), is_dry);
            }
        }
    }

    /// Otherwise two threads that ask in vain would wake each other for ever.
    #[test]
    fn an_answer_is_no_event() {
        let mut share = Share::new();
        let (first, second) = (ask(&mut share, false), {
            share.out = [0, 0];
            ask(&mut share, false)
        });
        share.out = [2, 0];
        share.came_back();
        assert_eq!(share.answered(first, Answer::Nothing, true), Tell::All);
        assert_eq!(share.answered(second, Answer::Nothing, true), Tell::All);
        let again = ask(&mut share, false);
        assert!(matches!(share.answered(again, Answer::Nothing, true), Tell::Dry { .. }));
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use std::sync::Arc;

    use loom::sync::atomic::{AtomicBool, Ordering};
    use loom::sync::{Condvar, Mutex, MutexGuard};

    use super::*;
    use crate::sync::{model, step};

    /// A pipeline with one segment at most, a transfer in each direction, and a thread for each: a worker for the
    /// first, a watcher for the second.
    struct Pipeline {
        state: Mutex<State>,
        bells: [Condvar; 2],
        /// The pool has a segment.
        pool: AtomicBool,
    }

    struct State {
        share: Share<()>,
        live: [bool; 2],
        asleep: [bool; 2],
        /// The time of all timers has come.
        late: bool,
        /// The worker that has asked in vain turns to something else, for as long as the second transfer takes.
        busy: bool,
    }

    impl Pipeline {
        fn new(busy: bool) -> Arc<Self> {
            let share = Share::new();
            let state = State { share, live: [true; 2], asleep: [false; 2], late: false, busy };
            Arc::new(Self {
                state: Mutex::new(state),
                bells: [Condvar::new(), Condvar::new()],
                pool: AtomicBool::new(false),
            })
        }

        /// Exchanged: the order of a plain store and of another thread's exchange is left open by loom.
        fn fill_pool(&self) {
            assert!(!self.pool.swap(true, Ordering::SeqCst), "there is one segment");
        }

        fn tell(&self, state: &mut State, tell: &Tell) {
            let told = match tell {
                Tell::None => [false, false],
                Tell::Dry { worker, untimed } => [*worker, *untimed],
                Tell::All => [true, true],
            };
            for which in 0..2 {
                if told[which] {
                    state.asleep[which] = false;
                    self.bells[which].notify_one();
                }
            }
        }

        /// A transfer is over.
        fn finish(&self, state: &mut State, which: usize) {
            state.live[which] = false;
            if state.live == [false; 2] && state.share.stash.pop().is_some() {
                self.fill_pool();
            }
            state.share.came_back();
            self.tell(state, &Tell::All);
        }

        /// The life of a thread, until both transfers are over.
        fn serve(&self, which: usize) {
            let (is_worker, direction) = (which == 0, Direction::BOTH[which]);
            let mut state = self.state.lock().unwrap();
            while state.live != [false; 2] {
                let events = state.share.events;
                if state.live[which] {
                    let wish = Wish { direction, all: 1, own: 1, beside: 0, pulled: false, patient: false };
                    let got = match state.share.look(&wish) {
                        Look::NotNow => false,
                        Look::Stashed => {
                            state.share.out[which] += 1;
                            state.share.stash.pop().is_some()
                        }
                        Look::Ask(question) => {
                            drop(state);
                            step();
                            let got = self.pool.swap(false, Ordering::SeqCst);
                            step();
                            state = self.state.lock().unwrap();
                            let answer = if got { Answer::Segment } else { Answer::Nothing };
                            let tell = state.share.answered(question, answer, is_worker);
                            self.tell(&mut state, &tell);
                            got
                        }
                    };
                    if got {
                        // It fills or drains its only chunk.
                        drop(state);
                        step();
                        state = self.state.lock().unwrap();
                        state.share.out[which] -= 1;
                        if state.live == [false; 2] {
                            self.fill_pool();
                        } else {
                            state.share.stash.push(());
                        }
                        state.share.came_back();
                        self.tell(&mut state, &Tell::All);
                        if state.live[which] {
                            self.finish(&mut state, which);
                        }
                        continue;
                    }
                    if state.share.events != events {
                        continue;
                    }
                }
                state = self.sleep(state, which);
            }
        }

        fn sleep<'a>(&'a self, mut state: MutexGuard<'a, State>, which: usize) -> MutexGuard<'a, State> {
            if which == 0 && state.busy {
                while state.live[1] {
                    state = self.bells[0].wait(state).unwrap();
                }
                return state;
            }
            let timed = if which == 0 { state.share.dry } else { state.share.lies_down(true) };
            state.asleep[which] = true;
            while state.asleep[which] && !(timed && state.late) {
                state = self.bells[which].wait(state).unwrap();
            }
            if std::mem::take(&mut state.asleep[which]) && state.share.is_dry_no_more() {
                state.share.events += 1;
                self.tell(&mut state, &Tell::All);
            }
            state
        }

        fn run(self: &Arc<Self>, meanwhile: impl FnOnce()) {
            let threads = [0, 1].map(|which| {
                let pipeline = self.clone();
                loom::thread::spawn(move || pipeline.serve(which))
            });
            meanwhile();
            step();
            // The pool tells nobody.
            self.fill_pool();
            self.state.lock().unwrap().late = true;
            self.bells.iter().for_each(Condvar::notify_one);
            // With a wake-up missed one of them sleeps for good, which loom tells.
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let state = self.state.lock().unwrap();
            assert_eq!((state.share.out, state.share.pulling), ([0, 0], 0), "counted for good");
            assert!(self.pool.load(Ordering::SeqCst), "the segment is the pool's again");
        }
    }

    /// The pool has nothing for the first transfer, which is cancelled while it is asked.
    #[test]
    fn loom_share_answer_is_told() {
        model("pipeline: a thread asks the pool in vain, another looks meanwhile", 3, || {
            let pipeline = Pipeline::new(false);
            pipeline.run(|| {
                step();
                let mut state = pipeline.state.lock().unwrap();
                if state.live[0] {
                    pipeline.finish(&mut state, 0);
                }
            });
        });
    }

    /// Both ask in vain, and then the pool has something again.
    #[test]
    fn loom_share_dry_is_told() {
        model("pipeline: two threads ask the pool in vain", 3, || Pipeline::new(false).run(|| ()));
        model("pipeline: the same, and one of them is busy", 3, || Pipeline::new(true).run(|| ()));
    }
}
