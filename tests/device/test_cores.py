from roundpipe.device.cores import count_cores, host_threads, usable_cores


def machine(root, siblings, **cgroup):
    for cpu, text in enumerate(siblings):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    for name, text in cgroup.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("cpu_max", "cpu.max")
        file = file.with_name(file.name.replace("cpu_cfs", "cpu.cfs"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_two_siblings_are_one_core(tmp_path):
    root = machine(tmp_path, ["0,4", "1,5", "2,6", "3,7"] * 2)
    assert count_cores(range(8), root) == 4
    assert count_cores({0, 4, 5}, root) == 2


def test_where_nothing_is_shown_every_cpu_is_a_core(tmp_path):
    assert count_cores({3, 5, 7}, tmp_path) == 3
    assert count_cores((), tmp_path) == 1


def test_a_containers_quota_of_time_counts(tmp_path):
    siblings = [str(cpu) for cpu in range(8)]
    for number, (expected, files) in enumerate(
        [
            (8, {"cpu_max": "max 100000"}),
            (4, {"cpu_max": "350000 100000"}),
            (1, {"cpu_max": "1000 100000"}),
            (8, {"cpu_max": "1600000 100000"}),
            (8, {"cpu_max": "nonsense"}),
            (3, {"cpu__cpu_cfs_quota_us": "300000", "cpu__cpu_cfs_period_us": "100000"}),
            (8, {"cpu__cpu_cfs_quota_us": "-1", "cpu__cpu_cfs_period_us": "100000"}),
        ]
    ):
        root = machine(tmp_path / str(number), siblings, **files)
        assert count_cores(range(8), root) == expected, files


def test_two_cores_are_left_to_others_but_half_are_taken():
    assert [host_threads(cores) for cores in (1, 2, 3, 4, 8, 64)] == [1, 1, 1, 2, 6, 62]


def test_this_machine_has_a_core():
    assert usable_cores() >= 1
